"""What a plan says of a packet: whom an address belongs to, by the AllowedIPs of its peers, and what a link is."""

from __future__ import annotations

import pytest

from schemas.host_objects import WireguardPeer
from schemas.plan import Entry, HostPlan
from schemas.values import Address, Key, Name, Prefix
from services.auditor.trace.view import view_of
from services.kernel.curve25519 import public_key

ONE, TWO = (Key(public_key(bytes([number]) * 32)) for number in (1, 2))


def peer(link: str, key: Key, *allowed: str) -> WireguardPeer:
    return WireguardPeer(link, key, None, tuple(map(Prefix, allowed)))


@pytest.mark.parametrize(
    "device, address, key",
    [
        ("me.0", "10.200.1.10", ONE),
        ("me.0", "10.200.2.10", TWO),
        ("me.0", "10.200.2.77", ONE),
        ("me.0", "fd00:200:0:2::10", TWO),
        ("me.0", "fd00:200:0:1::10", None),
        ("me.0", "10.201.0.1", None),
        ("mt.0", "10.201.0.1", TWO),
        ("mt.0", "fd00::1", None),
        ("mt.1", "10.200.1.10", None),
    ],
)
def test_the_longest_prefix_says_whose_an_address_is(device: str, address: str, key: Key | None) -> None:
    """On that device, and in its family alone: an address that roams is another peer's than those around it."""
    items = [
        peer("me.0", ONE, "10.200.0.0/16", "10.200.2.77/32"),
        peer("me.0", TWO, "10.200.2.0/24", "fd00:200:0:2::/64"),
        peer("mt.0", TWO, "0.0.0.0/0"),
    ]
    view = view_of(HostPlan(Name("rome"), Name("worker-3"), {"mesh/rome": {item.key: Entry(item, ()) for item in items}}))
    found = view.peer_for(device, Address(address))
    assert (found.public_key if found else None) == key


def test_no_link_has_no_role() -> None:
    """A packet that a host itself sends has come by none; any link that the plan does not know is somebody's behind it."""
    view = view_of(HostPlan(Name("rome"), Name("worker-3"), {}))
    assert (view.role(""), view.role("veth7"), view.role("lo")) == (None, "endpoint", "host")
