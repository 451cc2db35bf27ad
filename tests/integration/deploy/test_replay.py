"""The replay knows a part of the Containerfile's language and says so when it meets another."""

from __future__ import annotations

from pathlib import Path

import pytest

HEAD = "FROM debian:12-slim AS base\n"


def test_the_containerfile_is_understood_as_a_whole(replay):
    stages = replay.parse(replay.CONTAINERFILE.read_text())
    assert {"planner", "applier", "auditor"} < set(stages)
    for name in ("planner", "applier", "auditor"):
        (entrypoint,) = [step.text for step in stages[name].steps if step.verb == "ENTRYPOINT"]
        assert entrypoint == f'["meshmark", "{name}"]'
    assert [step.verb for step in stages["planner"].steps].count("USER") == 1


def test_lines_are_joined_and_comments_left_out(replay):
    stages = replay.parse(HEAD + "RUN one \\\n  # said between\n  && two\n\nENV A=1 B='x y'\n")
    assert [(step.verb, " ".join(step.text.split())) for step in stages["base"].steps] == [("RUN", "one && two"), ("ENV", "A=1 B='x y'")]


@pytest.mark.parametrize(
    "text,reason",
    [
        ("FROM debian:12-slim\n", "write FROM IMAGE AS NAME"),
        ("FROM alpine AS base\n", "neither an earlier stage nor one of debian:12-slim"),
        ("RUN true\n", "before the first FROM"),
        (HEAD + "ADD a b\n", "ADD: not an instruction that can be replayed"),
        (HEAD + "HEALTHCHECK NONE\n", "HEALTHCHECK: not an instruction"),
        (HEAD + "RUN --mount=type=cache,target=/x true\n", "only the shell form"),
        (HEAD + 'RUN ["true"]\n', "only the shell form"),
        (HEAD + "RUN cat <<EOF\n", "only the shell form"),
        (HEAD + "COPY --chown=1:1 a b\n", "only --from"),
        (HEAD + "COPY *.md /x/\n", "patterns cannot be replayed"),
        (HEAD + "COPY a\n", "needs a source and a destination"),
        (HEAD + "ENV A=$B\n", "without variables"),
        (HEAD + "ENV A 1\n", "only NAME=value"),
        (HEAD + "ENTRYPOINT meshmark\n", "only the list form"),
    ],
)
def test_what_is_not_known_is_an_error(replay, text: str, reason: str):
    with pytest.raises(replay.ReplayError) as failure:
        replay.parse(text)
    assert reason in str(failure.value)


def test_a_stage_depends_on_its_steps_and_on_the_files_it_copies(replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "CHECKOUT", tmp_path)
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "a.py").write_text("1")
    base = replay.Image(tmp_path, "base")

    def key(run: str = "true") -> str:
        stage = replay.parse(HEAD + f"RUN {run}\nCOPY schemas /src/schemas\n")["base"]
        return replay._stage_key(stage, base, {})

    first = key()
    assert key() == first
    assert key("false") != first
    (tmp_path / "schemas" / "__pycache__").mkdir()
    (tmp_path / "schemas" / "__pycache__" / "a.pyc").write_text("x")
    assert key() == first
    (tmp_path / "schemas" / "a.py").write_text("2")
    assert key() != first
    (tmp_path / "schemas" / "a.py").unlink()
    (tmp_path / "schemas").joinpath("__pycache__", "a.pyc").unlink()
    (tmp_path / "schemas" / "__pycache__").rmdir()
    (tmp_path / "schemas").rmdir()
    with pytest.raises(replay.ReplayError, match="COPY schemas: no such file"):
        key()


def test_a_program_gets_only_the_environment_that_it_is_given(replay, tmp_path: Path):
    image = replay.Image(tmp_path, "key", {"PATH": "/bin"}, user="meshmark")
    command = replay.command(image, ["meshmark", "planner"], capabilities=(), environment={"MESHMARK_HTTP": "a b"}, network="mm1")
    assert command[:2] == ["nsenter", "--net=/run/netns/mm1"]
    script = command[-1].splitlines()[-1]
    assert "env -i HOME=/root PATH=/bin 'MESHMARK_HTTP=a b' setpriv --no-new-privs --bounding-set=-all --inh-caps=-all" in script
    assert script.endswith("--reuid=meshmark --regid=meshmark --init-groups meshmark planner")
