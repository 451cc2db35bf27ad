"""Trace messages, decoded. The bytes are a real kernel's (6.18): a datagram over loopback, through two chains and into a policy drop."""

from __future__ import annotations

from services.kernel.netlink import message
from services.kernel.nftrace import TraceEvent, Tracked, trace_events

_KIND = 0x0A11
_INET = bytes((1, 0, 0, 0))
_NETWORK = bytes.fromhex("45000021ff71400040113d587f0000017f000001")
_TRANSPORT = bytes.fromhex("e5581e61000dfe2068656c6c6f")


def _attribute(kind: int, value: bytes) -> bytes:
    return (len(value) + 4).to_bytes(2, "little") + kind.to_bytes(2, "little") + value + b"\0" * (-len(value) % 4)


def _message(**values: str) -> bytes:
    body = _INET + b"".join(_attribute(int(name[1:]), bytes.fromhex(value)) for name, value in values.items())
    return message(_KIND, body, 0)


_FIRST = _message(
    a15="00000002",
    a4="00000003",
    a6="b8458aef",
    a2="6f75743200",
    a1="7400",
    a3="0000000000000006",
    a5="08000100ffffffff",
    a12="00000001",
    a13="0304",
    a8=_NETWORK.hex(),
    a9=_TRANSPORT.hex(),
    a21="00000008",
    a19="00",
    a18="5ad3468a",
)
_JUMP = _message(
    a4="00000003", a6="b8458aef", a2="6f75743200", a1="7400", a3="0000000000000007", a5="08000100fffffffd0800020073756200", a14="000004d2"
)
_POLICY = _message(a4="00000001", a6="9b4d568d", a2="696e00", a1="7400", a16="00000000", a14="000004d2")


def test_the_first_event_of_a_chain_has_headers_interfaces_and_the_connection() -> None:
    """What the kernel says once is all there."""
    (event,) = trace_events(_FIRST)
    assert event == TraceEvent(
        0xB8458AEF,
        1,
        "t",
        "out2",
        "rule",
        "continue",
        6,
        oif=1,
        network=_NETWORK,
        transport=_TRANSPORT,
        tracked=Tracked(0x5AD3468A, "new", is_reply=False),
    )


def test_a_jump_names_its_chain_and_a_policy_its_verdict() -> None:
    """Verdicts come nested, policies bare; the mark is there when it is not 0."""
    jump, policy = trace_events(_JUMP + _POLICY)
    assert (jump.verdict, jump.target, jump.handle, jump.mark) == ("jump", "sub", 7, 0x4D2)
    assert (policy.kind, policy.verdict, policy.handle, policy.tracked) == ("policy", "drop", 0, None)


def test_unknown_messages_attributes_and_verdicts_are_no_failure() -> None:
    """A newer kernel may say more, and a message may be cut off."""
    odd = _message(a4="00000003", a6="00000001", a99="ff", a5="0800010000007fff", a21="00000fff")
    assert list(trace_events(message(0x0A12, _INET, 0) + _FIRST[:24])) == []
    assert list(trace_events(_message(a4="00000009", a6="00000001"))) == []
    (event,) = trace_events(odd)
    assert (event.verdict, event.tracked) == ("unknown", Tracked(0, None, is_reply=False))


def test_what_is_no_trace_event_is_left_out() -> None:
    """Messages of other kinds, cut off ones, and those without what a trace event always has."""
    body = _INET + _attribute(4, bytes((0, 0, 0, 3))) + _attribute(6, bytes(4))
    assert len(list(trace_events(message(_KIND, body, 0)))) == 1
    without_id, strange = _INET + _attribute(4, bytes((0, 0, 0, 3))), _INET + _attribute(4, bytes((0, 0, 0, 9))) + _attribute(6, bytes(4))
    for kind, other in ((_KIND + 1, body), (_KIND, body[:3]), (_KIND, b""), (_KIND, without_id), (_KIND, strange)):
        assert list(trace_events(message(kind, other, 0))) == []
