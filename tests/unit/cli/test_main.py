"""The command as a whole: one clear line for each error, and help that is enough."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from services.cli import main as cli
from services.cli.main import application, main
from services.cli.output import console, line

COMMANDS = ("publish", "get", "delete", "plan", "status", "drift", "explain", "purge", "doctor", "planner", "applier", "auditor", "server")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("plan", "--nope"), "Unknown option"),
        (("publish",), "name topology files"),
        (("publish", "examples/two-clusters.yaml", "--wait-s", "-1"), "Must be >= 0"),
        (("nope",), "nope"),
        *(
            (("trace", "--from", "rome/shop", "--to", "rome/stock", option, "442.5"), f"{option}: '442.5' is no whole number")
            for option in ("--first", "--last", "--sample")
        ),
        (("doctor", "--marks", "1.5"), "--marks: '1.5' is no whole number"),
        *(
            (("doctor", "--marks", text), f"--marks: '{text}' is no whole number")
            for text in ("4e-1", "1e3", "inf", "0x1.8p1", "\u0663", "")
        ),
        *(
            (command, 'Invalid value for --port: unable to convert "442.5" into int')
            for command in (("trace", "--from", "x", "--to", "y", "--port", "80", "--port", "442.5"), ("doctor", "--port", "442.5"))
        ),
        (("get", "Foo", "--nats-url", "nats://127.0.0.1:1"), "the kinds are"),
        (("plan", "-f", "{folder}"), "Is a directory"),
        (("plan", "-f", "{folder}/none.yaml"), "No such file"),
        (("plan", "-f", "{folder}/empty.yaml"), "no topology object in it"),
        (("plan", "-f", "{folder}/string.yaml"), "got str"),
        (("plan", "-f", "{folder}/name.yaml"), "is not a name"),
        (("plan", "-f", "{folder}/date.yaml"), "not valid YAML: month must be in"),
        (("plan", "rome/typo", "-f", "examples/two-clusters.yaml"), "no host rome/typo"),
        (("status", "--credentials", "{folder}/none.json"), "No such file"),
        (("server", "--dir", "{folder}/empty.yaml/x"), "Not a directory"),
        (("applier", "--config", "{folder}/none.toml"), "No such file"),
        (("applier", "--cluster", "rome"), "--host"),
        (("auditor",), "--cluster"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path, capsys, arguments: tuple[str, ...], words: str):
    """Not 2, which says that there is a difference; and of three megabytes, what can be read."""
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "string.yaml").write_text("a" * 3_000_000)
    (tmp_path / "name.yaml").write_text(f"kind: Node\ncluster: rome\naddresses: [172.18.0.1]\nname: {'a' * 3_000_000}\n")
    (tmp_path / "date.yaml").write_text("kind: Node\nname: 2020-13-45\n")
    code, out, err = run(capsys, *(argument.format(folder=tmp_path) for argument in arguments))
    assert code == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 2500
    assert words in err


def test_what_the_system_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys):
    """A file or folder that the command cannot use is named in the system's own words."""

    def refuse(*_: object, **__: object) -> None:
        raise NotADirectoryError(20, "Not a directory", "here/lab.json")

    monkeypatch.setattr(cli, "application", lambda _words: refuse)
    assert run(capsys, "lab", "up") == (1, "", "error: here/lab.json: Not a directory\n")


def commands(app: App, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that does something."""
    for name in app:
        if not name.startswith("-"):
            words = (*before, name)
            if app[name].default_command is not None:
                yield words
            yield from commands(app[name], words)


@pytest.mark.parametrize("words", list(commands(application())), ids=" ".join)
def test_a_terminal_of_80_columns_shows_examples_whole(words: tuple[str, ...], capsys, monkeypatch: pytest.MonkeyPatch):
    """Their lines are not wrapped, but cut."""
    monkeypatch.setattr(console, "width", 80)
    application()([*words, "--help"])
    text = capsys.readouterr().out
    found = application()
    for word in words:
        found = found[word]
    code = (inspect.getdoc(found.default_command) or "").partition("```sh\n")[2].partition("```")[0]
    shown = [row.rstrip() for row in text.splitlines()]
    assert [line for line in code.splitlines() if f" {line}" not in shown] == []


def test_a_bad_argument_names_the_commands_own_help(capsys):
    """As it is typed, with no word that stands for others."""
    assert run(capsys, "trace", "--from", "a/b", "--to", "a/c", "--port", "http")[2].endswith("See: meshmark trace --help\n")
    assert run(capsys, "encrypt", "status", "--nope")[2].endswith("See: meshmark encrypt status --help\n")
    assert run(capsys, "nope")[2].endswith("See: meshmark --help\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_explains_every_parameter(command: str, capsys):
    app = application()
    app([command, "--help"])
    text = capsys.readouterr().out
    assert f"meshmark {command}" in text.partition("\n")[2], "an example, beside the usage"
    # A parameter without help shows nothing, or only what its type and default are.
    rows = [row for row in text.splitlines() if re.match(r"│ (\* )? *(-|[A-Z]{3})", row)]
    assert rows
    bare = [row for row in rows if not re.sub(r"\[(choices|default|required).*|--?[a-z-]+|[A-Z]{3,}\.*|[│*\s]", "", row)]
    assert not bare


@pytest.mark.parametrize("words", list(commands(application())), ids=" ".join)
def test_a_form_of_output_has_a_short_name_too(words: tuple[str, ...], capsys) -> None:
    """As with other commands of the field: whoever has learned it for one types it for all."""
    application()([*words, "--help"])
    text = capsys.readouterr().out
    assert ("--output" in text) == bool(re.search(r"--output +-o ", text))


@pytest.mark.parametrize(
    "words",
    [
        *(("-m", "services.cli.main", "plan", "-f", "examples/two-clusters.yaml", "-o", form) for form in ("json", "yaml", "table")),
        ("-m", "services.cli.main", "trace", "--help"),
        ("-c", "from services.cli import main; main.application = lambda _: lambda *_, **__: print('little'); main.main([])"),
    ],
    ids=["json", "yaml", "table", "help", "what is in the buffer still"],
)
def test_when_nobody_reads_on_it_ends_without_a_word(words: tuple[str, ...]) -> None:
    """As ``head`` has enough: no error, and the exit code of what a closed pipe ends."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, *words], env=environment, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_service_has_nothing_of_the_other_commands_in_memory() -> None:
    """Its help is the same."""
    code = "import sys; from services.cli.main import application as made; made(['applier']); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "services.cli.daemons" in found
    assert not [name for name in found if name.startswith(("services.planner.compile", "services.cli.plan", "services.cli.lab.app"))]


@pytest.mark.parametrize("text, shown", [("two\nlines", "two lines"), ("a  b", "a b")])
def test_whatever_is_said_is_one_line(text: str, shown: str):
    assert line(text) == shown


def test_of_a_long_line_the_ends_are_shown():
    text = line("start " + "x" * 3_000_000 + " end")
    assert len(text) < 700
    assert text.startswith("start ")
    assert text.endswith(" end")
    assert "3000010 characters" in text
