"""The guest of the suite real-kernel, with a script in the place of the emulated machine: results as they come, and an end in any case."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real_kernel import guest as module
from tests.real_kernel.guest import (
    CASES_MAX,
    ENCRYPTION,
    INSIDE,
    MESHES,
    PATHS_CASES_MAX,
    Guest,
    GuestError,
    sample,
    split,
)

FIRST, SECOND = "tests/contract/test_a.py::test_one", "tests/contract/test_a.py::test_two"
REPORT = """printf '{"id": "%s", "outcome": "%s", "text": "%s", "seconds": 0.1}\\n'"""

Boot = Callable[[str], Guest]


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Boot]:
    """Start a guest whose machine is a script of the shell; it has the shared folder as $DIR. All are ended when the test is."""
    started = []

    def start(script: str) -> Guest:
        folder = tmp_path / f"guest{len(started)}"
        folder.mkdir()
        program = tmp_path / f"vng{len(started)}"
        program.write_text(f"#!/bin/sh\nDIR={folder}\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setattr(module, "VNG", program)
        monkeypatch.setattr(module, "find_kernel", lambda: Path("/boot/vmlinuz-6.1"))
        made = Guest(folder, [FIRST, SECOND])
        started.append(made)
        made.start()
        return made

    yield start
    for made in started:
        made.end()


def processes(word: str) -> list[str]:
    """The processes that have this word in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # it ended meanwhile
            continue
    return [pid for pid in found if pid != str(os.getpid())]


def test_results_come_while_the_guest_runs(boot: Boot) -> None:
    """The first result is there before the guest has ended, a half-written line is none yet, and each has its outcome and text."""
    made = boot(
        f"""{REPORT} {FIRST} passed "" >$DIR/results.0; printf '{{"id": "{SECOND}", ' >$DIR/results.1
        while [ ! -e $DIR/go ]; do sleep 0.05; done
        printf '"outcome": "failed", "text": "no link", "seconds": 2}}\\n' >>$DIR/results.1; echo 0 >$DIR/exit.0; echo 1 >$DIR/exit.1"""
    )
    assert made.result(FIRST).outcome == "passed"
    (made._folder / "go").touch()
    assert (made.result(SECOND).outcome, made.result(SECOND).text) == ("failed", "no link")


def test_a_guest_that_hangs_is_ended_and_its_last_words_are_told(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit every test that is to come fails with the console's last lines, at once, and no process of it is left."""
    monkeypatch.setattr(module, "BOOT_S", 0.5)
    made = boot("echo kernel panic; trap '' TERM; sleep 987654 & wait; wait")
    monkeypatch.setattr(module, "_END_S", 0.5)
    with pytest.raises(GuestError, match=r"said nothing for 0.5 s(.|\n)*kernel panic"):
        made.result(FIRST)
    before = time.monotonic()
    with pytest.raises(GuestError, match="kernel panic"):
        made.result(SECOND)
    assert time.monotonic() < before + 1
    assert processes("987654") == []


def test_a_guest_that_ends_early_fails_what_it_did_not_run(boot: Boot) -> None:
    """What it ran counts; the rest fails and says that the guest ended."""
    made = boot(f'{REPORT} {FIRST} skipped "no such thing" >$DIR/results.0; echo bye')
    assert made.result(FIRST).text == "no such thing"
    with pytest.raises(GuestError, match=r"ended before this test(.|\n)*bye"):
        made.result(SECOND)


def test_a_run_that_complains_though_its_tests_passed_is_told(boot: Boot) -> None:
    """The exit code of the pytest inside counts too: it is not zero when something was left behind."""
    made = boot(
        f"{REPORT} {FIRST} passed '' >$DIR/results.0; {REPORT} {SECOND} passed '' >>$DIR/results.0\n"
        "echo left behind: mm-test; echo 0 >$DIR/exit.0; echo 1 >$DIR/exit.1"
    )
    assert "left behind: mm-test" in made.complaints()


def test_without_a_kernel_it_says_what_installs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names the command."""
    monkeypatch.setattr(module, "find_kernel", lambda: None)
    with pytest.raises(GuestError, match=r"./run test --suite real-kernel"):
        Guest(tmp_path, [FIRST]).start()


def test_of_many_cases_some_are_run_and_of_few_all() -> None:
    """The sample has every test, in order, and is the same each time; those on every path differ in all that they are about."""
    one = [f"tests/a.py::test_many[{number}]" for number in range(45)]
    many = [f"{MESHES}test_paths.py::test_many[{path}-{family}-{mode}]" for path in range(8) for family in (4, 6) for mode in "ab"]
    few = ["tests/a.py::test_one", *(f"tests/b.py::test_few[{number}]" for number in range(CASES_MAX))]
    found = sample([*one, *many, *few])
    chosen = found[CASES_MAX : -len(few)]
    assert set(found[:CASES_MAX]) < set(one)
    assert found[-len(few) :] == few
    assert sorted(chosen, key=many.index) == chosen
    assert all(len(set(place)) > 1 for place in zip(*(item.split("[")[1].split("-") for item in chosen), strict=True))
    assert sample([*one, *many, *few]) == found
    assert sample([]) == []


@pytest.mark.parametrize(
    "module,most",
    [
        ("tests/contract/a.py", CASES_MAX),
        (f"{MESHES}test_egress.py", CASES_MAX),
        (f"{MESHES}test_paths.py", PATHS_CASES_MAX),
        (f"{ENCRYPTION}test_paths.py", PATHS_CASES_MAX),
    ],
)
def test_half_of_the_cases_are_about_geneve(module: str, most: int) -> None:
    """What no other kernel at hand can run: where one case is run, that is one of those."""
    items = [f"{module}::test_path[{number}-{way}]" for number in range(20) for way in ("native", "vxlan", "geneve")]
    found = sample(items)
    assert (len(found), sum("geneve" in item for item in found)) == (most, (most + 1) // 2)
    assert sum("geneve" in item for item in sample([item for item in items if "geneve" in item])) == most
    assert len(sample([item for item in items if "geneve" not in item])) == most


def test_of_the_traces_few_cases_are_run() -> None:
    """Those that are named; none of a file of which none is."""
    items = [f"tests/trace/test_points.py::test[{name}]" for name in ("native", "opted-out", "geneve")]
    assert sample([*items, "tests/trace/test_sessions.py::test_two"]) == [items[0], items[2]]


def test_the_story_of_a_mesh_is_told_in_full() -> None:
    """Its tests follow each other."""
    story = [f"{INSIDE}/test_mesh.py::test_step[{number}]" for number in range(2 * CASES_MAX)]
    assert sample(story) == story


def test_what_shares_a_mesh_stays_together_in_one_of_two_even_runs() -> None:
    """Nothing is lost or run twice; meshes are in one run and encryption in the other, ahead, and the rest evens the two out."""
    encryption = [f"{ENCRYPTION}test_paths.py::test_path[{number}]" for number in range(40)]
    mesh = [f"{MESHES}test_paths.py::test_path", f"{INSIDE}/test_mesh.py::test_one"]
    others = [f"tests/a.py::test_{number}" for number in range(200)]
    one, two = split([*others, *mesh, *encryption])
    assert one[:40] == encryption
    assert two[:2] == mesh
    assert sorted([*one, *two]) == sorted([*others, *mesh, *encryption])
    assert (len(one) - 40) + 3 * 40 == (len(two) - 2) + 3 * 2
    assert split(mesh) == [mesh]
    assert split([]) == []
