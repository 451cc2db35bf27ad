"""What the command prints, for people and for what reads it in a pipe."""

from __future__ import annotations

import pytest

from services.cli.output import show_table

LONG = " ".join(f"word-{number}" for number in range(200))


def test_in_a_pipe_a_row_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that grep finds a host and what is said of it; whoever sets COLUMNS has it folded, as on a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    show_table(("HOST", "WHAT"), [("rome/worker-1", LONG), ("rome/worker-2", "-")])
    assert capsys.readouterr().out.splitlines() == ["HOST           WHAT", f"rome/worker-1  {LONG}", "rome/worker-2  -"]
    monkeypatch.setenv("COLUMNS", "100")
    show_table(("HOST", "WHAT"), [("rome/worker-1", LONG)])
    folded = capsys.readouterr().out.splitlines()
    assert len(folded) > 10
    assert max(map(len, folded)) <= 100
