"""The lab on disk."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

from services.cli.lab.state import Folder, Record, identify


def test_a_process_is_told_from_a_later_one_of_its_id():
    process = identify(os.getpid())
    assert process.alive
    assert not msgspec.structs.replace(process, started=process.started + 1).alive
    assert not msgspec.structs.replace(process, boot="another").alive


def test_a_process_that_ended_is_not_alive_before_it_is_waited_for():
    child = subprocess.Popen(["sleep", "600"])
    process = identify(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive
    child.wait()


def test_a_record_is_read_as_it_was_written_and_only_by_its_owner(tmp_path: Path):
    folder = Folder(tmp_path / "lab")
    assert folder.read() is None
    folder.make()
    record = Record(identify(os.getpid()), "ready", ["mm.underlay"], {"planner": identify(os.getpid())})
    folder.write(record)
    assert folder.read() == record
    assert folder.record.stat().st_mode & 0o777 == 0o600


def test_clearing_leaves_what_is_not_the_labs(tmp_path: Path):
    folder = Folder(tmp_path)
    folder.make()
    (tmp_path / "mine").write_text("precious")
    folder.clear()
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]
