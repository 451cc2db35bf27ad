"""Flow events as who reads Hubble's flows gets them."""

from __future__ import annotations

import json

from schemas import codec
from schemas.flow import Connection, EventType, FlowEvent, FlowMessage, Icmp

FLOW = FlowEvent(time="2026-01-01T00:00:00Z", uuid="1", verdict="FORWARDED", node_name="rome/worker-1", event_type=EventType(4, 13))


def test_a_flow_says_of_which_kind_it_is() -> None:
    """`Type` tells Hubble's kinds of flows apart: it is always written, and may be missing in what was written before it was."""
    message = FlowMessage(FLOW.node_name, FLOW.time, FLOW)
    written = json.loads(codec.encode(message))
    assert written["flow"]["Type"] == "L3_L4"
    assert codec.decode(codec.encode(message), FlowMessage) == message
    del written["flow"]["Type"]
    assert codec.decode(json.dumps(written).encode(), FlowMessage) == message


def test_what_is_left_out_is_what_protobuf_leaves_out() -> None:
    """But for what cannot be told from its absence: a request that is no reply, and an echo's type and code, which are 0."""
    assert set(json.loads(codec.encode(FLOW))) == {"Type", "time", "uuid", "verdict", "node_name", "event_type"}
    for value, written in (
        (codec.encode(Icmp(0, 0)), {"type": 0, "code": 0}),
        (codec.encode(Connection(7)), {"id": 7}),
        (codec.encode(Connection(7, direction="reply")), {"id": 7, "direction": "reply"}),
    ):
        assert json.loads(value) == written
