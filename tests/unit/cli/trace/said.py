"""What real hosts told of a flow, as they say it."""

from __future__ import annotations

from schemas.flow import FlowMessage
from tests.unit.auditor.trace.test_recorded import told

HOSTS = (("rome", "worker-1"), ("rome", "worker-2"))


def messages(name: str) -> list[FlowMessage]:
    _, events = told(name)
    return [FlowMessage(event.node_name, event.time, event) for event in events]
