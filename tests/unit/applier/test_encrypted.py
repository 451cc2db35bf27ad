"""A node's unit for encryption on the kernel in memory: what is on its links comes after them, and terminal routes come before all."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.host_objects import (
    GUARD_METRIC,
    FdbEntry,
    LinkAddress,
    Neighbour,
    NextHop,
    PlanObject,
    PolicyRule,
    Route,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.plan import Entry, HostPlan
from schemas.values import Address, Endpoint, Key, Mac, Name, Prefix
from services.applier.core import Applier
from services.kernel.curve25519 import public_key
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Change, repairs

MESH = VxlanLink("mo.mesh", 7, Address("192.0.2.1"), None, Mac("02:4d:00:00:00:01"), 1390)
FAR = Mac("02:4d:00:00:00:02")
PEER = Key(public_key(bytes([2]) * 32))
OBJECTS: list[PlanObject] = [
    MESH,
    LinkAddress("mo.mesh", Address("10.80.0.1"), 24),
    FdbEntry("mo.mesh", FAR, Address("192.0.2.2")),
    Neighbour("mo.mesh", Address("10.80.0.2"), FAR),
    WireguardLink("mt.node", 51871, 1440, fwmark=0xE00),
    LinkAddress("mt.node", Address("10.81.0.1"), 32),
    WireguardPeer("mt.node", PEER, Endpoint("192.0.2.2:51871"), (Prefix("10.1.2.0/24"),)),
    Route(10, Prefix("0.0.0.0/0"), "unreachable", GUARD_METRIC),
    Route(10, Prefix("0.0.0.0/0"), hops=(NextHop("mt.node"),), source=Address("10.81.0.1")),
    Route(10, Prefix("10.1.1.0/24"), "throw"),
    PolicyRule(1000, 10, 0x800, 0x800),
]


def plan(*objects: PlanObject) -> HostPlan:
    units = {"encryption/rome": {item.key: Entry(item, ()) for item in objects}} if objects else {}
    return HostPlan(Name("rome"), Name("worker-1"), units)


def written(host: FakeHost, made: list[Change], wanted: HostPlan) -> list[str]:
    """The keys that a turn wrote, in order; the kernel holds what was wanted after it."""
    assert repairs(wanted.objects(), FakeKernel(host).reference(wanted.objects()), FakeKernel(host).read(wanted.objects())) == []
    return [change.key for change in made]


def test_terminal_routes_come_first_and_neighbours_after_their_link() -> None:
    """Nobody's own pods are looked for in the tunnel, and no rule leads into a table that guards nothing; removal is the way back."""
    host, made = FakeHost(), list[Change]()
    one = Applier(FakeKernel(host, made.append), lambda: 0.0)  # type: ignore[arg-type]
    one.apply(plan(*OBJECTS), 1, 1)
    assert written(host, made, plan(*OBJECTS)) == [
        "route 10 0.0.0.0/0 4278198272",
        "route 10 10.1.1.0/24 0",
        "rule 1000 fwmark 0x800/0x800 iif - to -",
        "link mo.mesh",
        "link mt.node",
        "address mo.mesh 10.80.0.1/24",
        "address mt.node 10.81.0.1/32",
        f"fdb mo.mesh {FAR}",
        "neighbour mo.mesh 10.80.0.2",
        f"peer mt.node {PEER}",
        "route 10 0.0.0.0/0 0",
    ]
    made.clear()
    one.apply(plan(), 1, 2)
    keys = [change.key for change in made]
    assert keys[:2] == ["link mo.mesh", "link mt.node"]
    assert keys[-2:] == ["route 10 0.0.0.0/0 4278198272", "route 10 10.1.1.0/24 0"]
    assert host.objects == {}


def test_a_link_with_another_mac_gets_its_neighbours_back() -> None:
    """What the kernel forgets with the change is written again in the same turn."""
    host, made = FakeHost(), list[Change]()
    one = Applier(FakeKernel(host, made.append), lambda: 0.0)  # type: ignore[arg-type]
    one.apply(plan(*OBJECTS), 1, 1)
    made.clear()
    changed = plan(replace(MESH, mac=Mac("02:4d:00:00:00:99")), *OBJECTS[1:])
    assert one.apply(changed, 1, 2).outcome == "applied"
    assert written(host, made, changed) == [
        "link mo.mesh",
        "address mo.mesh 10.80.0.1/24",
        f"fdb mo.mesh {FAR}",
        "neighbour mo.mesh 10.80.0.2",
    ]


def test_a_prefix_that_is_encrypted_from_now_on_leads_into_the_tunnel_last() -> None:
    """A `throw` becomes a hop when the link is there, and a hop becomes a `throw` before anything goes."""
    host, made = FakeHost(), list[Change]()
    one = Applier(FakeKernel(host, made.append), lambda: 0.0)  # type: ignore[arg-type]
    clear = plan(*OBJECTS, Route(10, Prefix("10.1.3.0/24"), "throw"))
    third = WireguardPeer("mt.node", Key(public_key(bytes([3]) * 32)), None, (Prefix("10.1.3.0/24"),))
    encrypted = plan(*OBJECTS, third, Route(10, Prefix("10.1.3.0/24"), hops=(NextHop("mt.node"),)))
    one.apply(clear, 1, 1)
    made.clear()
    one.apply(encrypted, 1, 2)
    assert written(host, made, encrypted) == [third.key, "route 10 10.1.3.0/24 0"]
    made.clear()
    one.apply(clear, 1, 3)
    assert written(host, made, clear) == ["route 10 10.1.3.0/24 0", third.key]
