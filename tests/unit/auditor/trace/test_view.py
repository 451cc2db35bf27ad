"""What a plan says of a packet: whom an address belongs to, by the AllowedIPs of its peers, and what a link is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.host_objects import PlanObject, VxlanLink, WireguardLink, WireguardPeer
from schemas.plan import Entry, HostPlan
from schemas.values import Address, Endpoint, Key, Mac, Name, Prefix
from services.auditor.trace.view import View, view_of
from services.kernel.curve25519 import public_key
from services.kernel.headers import TCP, UDP, Packet
from tests.topologies import encrypting, settled_plans
from tests.tracing import ONE as HOST

ONE, TWO, THREE = (Key(public_key(bytes([number]) * 32)) for number in (1, 2, 3))


def peer(link: str, key: Key, *allowed: str, endpoint: str = "") -> WireguardPeer:
    return WireguardPeer(link, key, Endpoint(endpoint) if endpoint else None, tuple(map(Prefix, allowed)))


def view(*items: PlanObject) -> View:
    """That of a plan that has these objects."""
    return view_of(HostPlan(Name("rome"), Name("worker-3"), {"mesh/rome": {item.key: Entry(item, ()) for item in items}}))


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
    found = view(*items).peer_for(device, Address(address))
    assert (found.public_key if found else None) == key


@pytest.mark.parametrize(
    "device, address, port, key",
    [
        ("me.0", "172.18.0.11", 51871, ONE),
        ("me.0", "172.18.0.11", 40000, ONE),  # by a translation of ports: nobody else is there
        ("me.0", "172.18.0.12", 51871, TWO),
        ("me.0", "172.18.0.12", 51872, THREE),
        ("me.0", "172.18.0.12", 40000, None),  # two are there
        ("me.0", "172.18.0.13", 51871, None),
        ("mt.0", "172.18.0.11", 51871, None),
    ],
)
def test_a_peer_is_known_by_its_endpoint(device: str, address: str, port: int, key: Key | None) -> None:
    """At another port it is told by its address where no other peer has this one; one without an endpoint is never meant."""
    items = [
        peer("me.0", ONE, endpoint="172.18.0.11:51871"),
        peer("me.0", TWO, endpoint="172.18.0.12:51871"),
        peer("me.0", THREE, endpoint="172.18.0.12:51872"),
        peer("me.0", Key(public_key(bytes([4]) * 32))),
        peer("me.0", Key(public_key(bytes([5]) * 32)), endpoint="gw.example.net:51871"),
    ]
    found = view(*items).peer_at(device, Address(address), port)
    assert (found.public_key if found else None) == key


def test_outer_packets_are_known_by_their_ports() -> None:
    """WireGuard's by the own one, of which it is a header that says so; an overlay's by the far one, and UDP alone."""
    mesh = view(
        WireguardLink("me.0", 51871, 1420), VxlanLink("mm.4", 77, Address("172.18.0.11"), None, Mac("02:00:00:00:00:01"), 1370, 8472)
    )
    data = bytes(8) + b"\x04" + bytes(3) + bytes(12)
    sent = Packet(Address("172.18.0.11"), Address("172.18.0.12"), UDP, 100, source_port=51871, destination_port=8472, transport=data)
    leaving, arriving = mesh.outer(sent, leaves=True), mesh.outer(sent, leaves=False)
    assert leaving is not None
    assert (leaving[0].name, leaving[1].message, arriving) == ("me.0", "data", None)
    assert mesh.overlay(sent) == "VXLAN"
    assert mesh.overlay(replace(sent, protocol=TCP)) is None
    assert mesh.overlay(replace(sent, destination_port=8473)) is None
    assert mesh.outer(replace(sent, transport=bytes(24)), leaves=True) is None


def test_the_mark_of_the_decrypted_is_what_the_plan_gives() -> None:
    """To what comes by a WireGuard device; where nothing is encrypted there is none."""
    mesh = view_of(settled_plans(encrypting())[HOST])
    assert mesh.decrypted is not None
    value, mask = mesh.decrypted
    assert mesh.was_decrypted(value | ~mask & 0xFFFF_FFFF)
    assert not mesh.was_decrypted(value ^ mask)
    clear = view_of(settled_plans(encrypting(encryption="none", strict="off"))[HOST])
    assert not any(map(clear.was_decrypted, (0, value)))


def test_no_link_has_no_role() -> None:
    """A packet that a host itself sends has come by none; any link that the plan does not know is somebody's behind it."""
    empty = view()
    assert (empty.role(""), empty.role("veth7"), empty.role("lo")) == (None, "endpoint", "host")
