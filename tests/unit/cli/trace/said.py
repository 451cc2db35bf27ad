"""What real hosts told of a flow, as they say it, and what the command shows of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.flow import FlowMessage
from services.cli.trace.command import trace
from tests.unit.auditor.trace.test_recorded import told
from tests.unit.cli.broker import StubBroker

HOSTS = (("rome", "worker-1"), ("rome", "worker-2"))


def messages(name: str) -> list[FlowMessage]:
    _, events = told(name)
    return [FlowMessage(event.node_name, event.time, event) for event in events]


async def shown(capsys: pytest.CaptureFixture[str], broker: StubBroker, path: Path, **options: object) -> tuple[int, str]:
    ends = {"source": "rome/shop", "destination": "rome/stock", "output": "compact", **options}
    code = await trace(**ends, input_file=path, nats=broker)  # type: ignore[arg-type]
    return code, capsys.readouterr().out
