"""With whom a node speaks in clear, as topology and open alerts have it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.drift import ClearPacket, DriftEvent, Tunnel
from schemas.values import Address, Name
from services.cli.far_ends import FarEnd, far_ends, said
from services.planner.state import State
from tests.topologies import encrypting

ROME = Name("rome")
PACKET = ClearPacket("out", "pods", "udp", Address("10.200.1.10"), Address("10.200.2.10"), 40521, 7000)
ALERT = DriftEvent(ROME, Name("worker-1"), "plaintext", "out pods 10.200.1.10 10.200.2.10", "raised", count=12, packet=PACKET)
BACK = replace(PACKET, direction="in", source=PACKET.destination, destination=PACKET.source)
OPTED_OUT = FarEnd("worker-3", "optedOut")


def found(*alerts: DriftEvent, of: str = "worker-1", on_purpose: bool = False, without: str = "", **changes: object) -> tuple[FarEnd, ...]:
    items = encrypting(**changes)
    state = State(item for item in items if not (item.kind == "PublicKey" and item.name == without))
    return far_ends(state, state.nodes[ROME][of], alerts, on_purpose=on_purpose)


@pytest.mark.parametrize(
    "packet",
    [
        PACKET,
        BACK,
        replace(PACKET, destination=Address("10.200.1.77")),
        replace(PACKET, destination=Address("fd00:200:0:2::99")),
        replace(PACKET, traffic="nodes", source=Address("172.18.0.11"), destination=Address("172.18.0.12")),
        replace(
            PACKET,
            traffic="overlay",
            destination=Address("10.80.0.9"),
            tunnel=Tunnel("VXLAN", Address("172.18.0.11"), Address("172.18.0.12"), 77),
        ),
    ],
    ids=["left", "arrived", "a roaming pod's", "of a pod that nobody published", "of nodes", "of the overlay"],
)
def test_an_alerts_packets_are_with_the_node_that_has_the_far_address(packet: ClearPacket) -> None:
    assert found(replace(ALERT, packet=packet)) == (FarEnd("worker-2", "encrypts", 1, 12),)


def test_alerts_of_one_far_end_are_added_up() -> None:
    """Both directions, and each two addresses; what is alerted is named, whatever else the far end does."""
    ends = found(ALERT, replace(ALERT, packet=BACK, count=3), on_purpose=True)
    assert ends == (FarEnd("worker-2", "encrypts", 2, 15), OPTED_OUT)
    assert list(said(ends)) == [
        "leaks with worker-2: at least 15 packets, by 2 open alerts",
        "in clear, and meant to be, with worker-3 (opted out)",
    ]


@pytest.mark.parametrize(
    "alert",
    [
        replace(ALERT, packet=None, key="out pods"),
        replace(ALERT, key="out pods others"),
        replace(ALERT, packet=replace(PACKET, destination=Address("198.51.100.7"))),
    ],
    ids=["only counted", "of more pairs than are told apart", "of nobody's address"],
)
def test_what_names_no_pair_is_counted_for_none(alert: DriftEvent) -> None:
    assert found(alert) == ()


def test_far_ends_in_clear_on_purpose() -> None:
    """Those that opted out or have no key yet, for a node that would encrypt: of another one everything is in clear."""
    assert found(on_purpose=True, without="worker-2") == (FarEnd("worker-2", "noKey"), OPTED_OUT)
    assert found(on_purpose=True, without="worker-1") == (OPTED_OUT,)
    assert found(of="worker-3", on_purpose=True) == ()
    assert found(on_purpose=True, encryption="none", strict="off") == ()
    assert found() == ()


def test_many_are_not_all_named() -> None:
    (line,) = said(FarEnd(f"worker-{number}", "noKey") for number in range(23))
    assert line.startswith("in clear, and meant to be, with worker-0 (no key yet), worker-1 (no key yet)")
    assert line.endswith("worker-19 (no key yet), and 3 more")
