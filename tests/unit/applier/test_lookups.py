"""Endpoints that are names: when they are looked up, which address they have, and what is in the kernel meanwhile."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.plan import Entry, HostPlan
from schemas.values import Address, Endpoint, Key, Name, Prefix
from services.applier import lookups
from services.applier.core import Applier
from services.applier.lookups import LOOK_AGAIN_S, Names, addresses_of, resolved
from services.kernel.curve25519 import public_key
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import repairs

NAME = Endpoint("gw-c.example.invalid:51840")
OLD, NEW, SIX = Address("192.0.2.30"), Address("192.0.2.31"), Address("2001:db8::30")
LINK = WireguardLink("mt.0", 51840, 1420)


def peer(number: int, endpoint: Endpoint | None) -> WireguardPeer:
    return WireguardPeer(LINK.name, Key(public_key(bytes([number]) * 32)), endpoint, (Prefix(f"10.{number}.0.0/16"),))


A, B, C = peer(1, Endpoint("192.0.2.11:51840")), peer(2, Endpoint("[2001:db8::12]:51820")), peer(3, NAME)
OBJECTS: dict[str, PlanObject] = {item.key: item for item in (LINK, A, B, C)}
PLAN = HostPlan(Name("rome"), Name("gateway"), {"peering/rome": {key: Entry(item, ()) for key, item in OBJECTS.items()}})


def names(*endpoints: Endpoint) -> Names:
    """Known names, of which a failed one waits as many seconds as it has failed."""
    made = Names(float)
    made.watch(endpoints)
    return made


def test_a_name_is_looked_up_until_it_has_an_address() -> None:
    """At once, then later each time; with an address it is left alone for as long as its peer shakes hands."""
    known = names(NAME, Endpoint("192.0.2.11:51840"))
    assert known.due(100.0, ()) == ["gw-c.example.invalid"]
    for number in (1, 2, 3):
        known.failed("gw-c.example.invalid", "no such name", 100.0 * number)
        assert known.waiting() == {"gw-c.example.invalid": "no such name"}
        assert known.next_s() == 101.0 * number
        assert known.due(101.0 * number - 0.5, ()) == []
        assert known.due(101.0 * number, ()) == ["gw-c.example.invalid"]
    assert known.found("gw-c.example.invalid", [OLD, SIX], 400.0, ())
    assert known.addresses() == {NAME: "192.0.2.30:51840"}
    assert known.waiting() == {}
    assert known.next_s() is None
    assert known.due(1e6, ()) == []


def test_a_name_that_leads_elsewhere_is_followed_when_the_old_way_is_stale() -> None:
    """Not at a look-up while the peer is there, and not to another of several addresses while the known one is among them."""
    known = names(NAME)
    known.found("gw-c.example.invalid", [OLD], 0.0, [NAME])
    assert known.due(LOOK_AGAIN_S - 1, [NAME]) == []
    assert known.due(LOOK_AGAIN_S, [NAME]) == ["gw-c.example.invalid"]
    assert not known.found("gw-c.example.invalid", [NEW, OLD], 10.0, [NAME])
    assert not known.found("gw-c.example.invalid", [NEW], 20.0, [])
    assert known.addresses() == {NAME: "192.0.2.30:51840"}
    known.failed("gw-c.example.invalid", "no answer", 30.0)
    assert known.addresses() == {NAME: "192.0.2.30:51840"}
    assert known.found("gw-c.example.invalid", [SIX, NEW], 40.0, [NAME])
    assert known.addresses() == {NAME: "[2001:db8::30]:51840"}


def test_each_tunnel_of_a_name_has_its_own_way() -> None:
    """One look-up is for all ports, and the tunnel that works stays where it is."""
    second = NAME.moved(1)
    known = names(NAME, second)
    assert known.due(0.0, ()) == ["gw-c.example.invalid"]
    known.found("gw-c.example.invalid", [OLD], 0.0, ())
    known.found("gw-c.example.invalid", [NEW], 10.0, [second])
    assert known.addresses() == {NAME: "192.0.2.30:51840", second: "192.0.2.31:51841"}
    known.watch([second])
    assert known.addresses() == {second: "192.0.2.31:51841"}
    known.watch([])
    assert known.due(1e6, ()) == []


def test_a_plan_without_names_is_the_plan() -> None:
    """The very same objects; with names, the others are."""
    plain = {item.key: item for item in (LINK, A, B)}
    assert resolved(plain, {}) is plain
    assert resolved(OBJECTS, {}) == {**OBJECTS, C.key: replace(C, endpoint=None)}
    assert resolved(OBJECTS, {NAME: Endpoint("192.0.2.30:51840")})[C.key] == replace(C, endpoint=Endpoint("192.0.2.30:51840"))


def test_peers_are_there_while_a_name_has_no_address() -> None:
    """All at once, one of them without an endpoint; its address comes and goes without another write, and none is drift."""
    made = []
    host = FakeHost()
    one = Applier(FakeKernel(host, made.append), lambda: 0.0)  # type: ignore[arg-type]
    assert one.apply(PLAN, 1, 1).outcome == "applied"
    assert {key: item.endpoint for key, item in host.objects.items() if isinstance(item, WireguardPeer)} == {
        A.key: A.endpoint,
        B.key: B.endpoint,
        C.key: None,
    }
    for found in (OLD, NEW):
        made.clear()
        addresses = {NAME: Endpoint.at(found, 51840)}
        assert one.apply(PLAN, 1, 1, addresses=addresses).outcome == "applied"
        assert [change.key for change in made] == [C.key]
        assert host.objects[C.key] == replace(C, endpoint=Endpoint.at(found, 51840))
        assert one.differences(PLAN) == []
        kernel = FakeKernel(host)
        assert repairs(OBJECTS, kernel.reference(OBJECTS), kernel.read(OBJECTS)) == []
    made.clear()
    again = Applier(FakeKernel(host, made.append), lambda: 0.0)  # type: ignore[arg-type]
    again.apply(PLAN, 1, 1)
    assert made == []
    assert host.objects[C.key] == replace(C, endpoint=Endpoint.at(NEW, 51840))


def answering(*places: str) -> Any:
    """A resolver that gives these addresses."""
    return lambda *_, **__: [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (place, 0)) for place in places]


async def test_a_resolver_is_asked_and_its_order_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address once; one that means something on one link only is none."""
    monkeypatch.setattr(socket, "getaddrinfo", answering("fe80::1%eth0", str(SIX), str(OLD), str(SIX)))
    assert await addresses_of("gw-c.example.invalid") == [SIX, OLD]
    monkeypatch.setattr(socket, "getaddrinfo", answering("fe80::1%eth0"))
    with pytest.raises(OSError, match="no address that packets can be sent to"):
        await addresses_of("gw-c.example.invalid")


async def test_a_name_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the resolver's words."""

    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(OSError, match="Name or service not known"):
        await addresses_of("gw-c.example.invalid")


async def test_a_resolver_that_hangs_has_failed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are asked meanwhile, and its late answer is nobody's."""
    go_on = threading.Event()

    def hang(name: str, *_: object, **__: object) -> Any:
        if name == "slow.example":
            go_on.wait()
        return answering(str(OLD))()

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(lookups, "LOOKUP_S", 0.05)
    slow = asyncio.create_task(addresses_of("slow.example"))
    assert await addresses_of("quick.example") == [OLD]
    with pytest.raises(OSError, match=r"no answer within 0\.05 s"):
        await slow
    go_on.set()
