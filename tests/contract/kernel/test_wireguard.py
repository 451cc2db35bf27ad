"""WireGuard devices and peers: what any kernel promises about ports, about many peers, and about prefixes that move between them."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.values import Endpoint, Key, Prefix
from services.kernel.transaction import Change, changes
from services.kernel.uapi import Userspace
from services.kernel.wireguard_device import DeviceState, Implementation
from services.kernel.wireguard_kernel import KernelModule
from services.runtime.errors import Conflict, MeshmarkError, Permanent, Waiting
from tests.contract.kernel.gateway_plan import PEERS, tunnel
from tests.contract.kernel.machines import LinuxMachine, Machine, converge, differences

PORT = 51977


def mesh(tag: str, count: int, number: int = 5) -> dict[str, PlanObject]:
    """A device of this number with so many peers, each with two prefixes."""
    link = tunnel(tag, number)
    peers = [
        WireguardPeer(
            link,
            Key(base64.b64encode(place.to_bytes(32, "big")).decode()),
            Endpoint(f"127.1.{place // 256}.{place % 256}:51871"),
            (Prefix(f"10.{64 + place // 256}.{place % 256}.0/24"), Prefix(f"fd00:{place:x}::/64")),
        )
        for place in range(1, count + 1)
    ]
    return {item.key: item for item in (WireguardLink(link, PORT + number - 5, 1420), *peers)}


def peers_of(plan: dict[str, PlanObject]) -> list[WireguardPeer]:
    return [item for item in plan.values() if isinstance(item, WireguardPeer)]


def test_a_taken_port_is_a_conflict_that_says_who_has_it(machine: Machine) -> None:
    """Nothing is made of the link, and as soon as the port is free it comes; a link that is there stays on its port."""
    taker = machine.take_port(PORT)
    link = WireguardLink(tunnel(machine.tag, 5), PORT, 1420)
    with pytest.raises(Conflict, match=f"UDP port {PORT} is taken by") as caught:
        machine.kernel.write(Change(None, link))
    assert taker in str(caught.value)
    assert dict(machine.kernel.read({})) == {}
    other = replace(link, listen_port=PORT + 1)
    machine.kernel.write(Change(None, other))
    with pytest.raises(Conflict, match=f"UDP port {PORT} is taken by"):
        machine.kernel.write(Change(other, link))
    assert machine.kernel.read({})[link.key] == replace(other, public_key=machine.kernel.public_key())
    machine.free_port(PORT)
    machine.kernel.write(Change(other, link))
    assert differences(machine.kernel, {link.key: link}) == []


def test_a_device_is_given_the_key_that_is_planned_for_it(machine: Machine) -> None:
    """Two devices may have two of the host's keys; one that gets another key keeps its peers, and shows no handshake of the old one."""
    kernel, link = machine.kernel, WireguardLink(tunnel(machine.tag, 5), PORT, 1420)
    kernel.make_next_key()
    ring = kernel.keys()
    old, new = replace(link, public_key=ring.key), replace(link, public_key=ring.next)
    peer = WireguardPeer(link.name, Key(PEERS[0]), Endpoint("127.1.0.1:51871"), (Prefix("10.64.1.0/24"),), 5)
    beside = WireguardLink(tunnel(machine.tag, 6), PORT + 1, 1420, ring.next)
    for item in (old, beside, peer):
        kernel.write(Change(None, item))
    assert differences(kernel, {item.key: item for item in (old, beside, peer)}) == []
    kernel.write(Change(old, new))
    assert differences(kernel, {item.key: item for item in (new, beside, peer)}) == []
    assert [found.handshake_s for found in kernel.peers(link.name)] == [0.0]
    assert ring.next is not None
    kernel.promote_key(ring.next)
    assert differences(kernel, {item.key: item for item in (new, beside, peer)}) == []
    assert kernel.read({})[beside.key] == beside


def test_many_peers_come_change_and_go_together(machine: Machine) -> None:
    """One call for all of them; what it says failed is nothing."""
    plan = mesh(machine.tag, 60)
    link = next(item for item in plan.values() if isinstance(item, WireguardLink))
    machine.kernel.write(Change(None, link))
    assert dict(machine.kernel.write_all([Change(None, peer) for peer in peers_of(plan)])) == {}
    assert differences(machine.kernel, plan) == []
    changed = {**plan, **{peer.key: replace(peer, keepalive_seconds=25) for peer in peers_of(plan)}}
    assert dict(machine.kernel.write_all(changes(plan, changed))) == {}
    assert differences(machine.kernel, changed) == []
    assert dict(machine.kernel.write_all([Change(peer, None) for peer in peers_of(changed)])) == {}
    assert differences(machine.kernel, {link.key: link}) == []


def test_one_wrong_peer_keeps_no_other_out(machine: Machine) -> None:
    """The host's own key and the key of nobody are refused by name; all others are there."""
    plan = mesh(machine.tag, 3)
    link, *_ = plan.values()
    machine.kernel.write(Change(None, link))
    nobody = Key("A" * 43 + "=")
    wrong = [replace(peers_of(plan)[0], public_key=key, allowed_ips=()) for key in (machine.kernel.public_key(), nobody)]
    errors = machine.kernel.write_all([Change(None, item) for item in (*wrong, *peers_of(plan))])
    assert {key: type(error) for key, error in errors.items()} == {item.key: Permanent for item in wrong}
    assert differences(machine.kernel, plan) == []


def test_peers_of_a_link_that_is_not_there_wait_for_it(machine: Machine) -> None:
    """Each of them by its own name; those that go are gone."""
    first, second = peers_of(mesh(machine.tag, 2))
    errors: dict[str, MeshmarkError] = dict(machine.kernel.write_all([Change(None, first), Change(second, None)]))
    assert errors.keys() == {first.key}
    assert isinstance(errors[first.key], Waiting)


def test_peers_are_greeted_on_request(machine: Machine) -> None:
    """They stay what they are, also one that is nowhere yet; nobody else is touched, and a link that is not there is nothing."""
    plan = mesh(machine.tag, 3)
    converge(machine.kernel, plan)
    one, two, _ = peers_of(plan)
    nowhere = replace(two, endpoint=None, keepalive_seconds=5)
    machine.kernel.write(Change(two, None))
    machine.kernel.write(Change(None, nowhere))
    machine.kernel.greet(one.link, [one.public_key, two.public_key, Key(PEERS[0])])
    assert differences(machine.kernel, {**plan, two.key: nowhere}) == []
    machine.kernel.greet(tunnel(machine.tag, 6), [one.public_key])


def test_prefixes_change_places_in_one_call(machine: Machine) -> None:
    """Each of three peers gets a prefix of another, one of them a new one besides, and one is left without any."""
    plan = mesh(machine.tag, 4)
    converge(machine.kernel, plan)
    one, two, three, four = peers_of(plan)
    new = [
        replace(one, allowed_ips=(three.allowed_ips[0], one.allowed_ips[1])),
        replace(two, allowed_ips=(one.allowed_ips[0], two.allowed_ips[1])),
        replace(three, allowed_ips=(two.allowed_ips[0], Prefix("10.99.0.0/16"))),
        replace(four, allowed_ips=()),
    ]
    changed = {**plan, **{item.key: item for item in new}}
    assert dict(machine.kernel.write_all(changes(plan, changed))) == {}
    assert differences(machine.kernel, changed) == []


def test_a_prefix_by_itself_inside_anothers_is_no_theft(machine: Machine) -> None:
    """A longer prefix at one peer stands beside the shorter one at another."""
    plan = mesh(machine.tag, 2)
    one, two = peers_of(plan)
    plan[one.key] = replace(one, allowed_ips=(Prefix("10.200.0.0/16"),))
    plan[two.key] = replace(two, allowed_ips=(Prefix("10.200.5.0/24"),))
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []


def test_a_theft_is_told_with_both_peers(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """One difference, of the peer that was robbed; setting that one right is all."""
    converge(machine.kernel, plan)
    thief = next(item for item in peers_of(plan) if item.public_key == PEERS[0])
    robbed = next(item for item in peers_of(plan) if item.link == thief.link and item.public_key == PEERS[2])
    machine.kernel.write(Change(thief, replace(thief, allowed_ips=(*thief.allowed_ips, robbed.allowed_ips[0]))))
    [change] = differences(machine.kernel, plan)
    assert change.key == robbed.key
    assert f"{robbed.allowed_ips[0]} is at peer {thief.public_key}" in str(change.old)
    machine.kernel.write(change)
    assert differences(machine.kernel, plan) == []


def test_an_endpoint_that_is_not_planned_is_never_a_difference(machine: Machine) -> None:
    """Whatever the device has: a hundred looks find nothing."""
    plan = mesh(machine.tag, 1)
    converge(machine.kernel, plan)
    [peer] = peers_of(plan)
    plan[peer.key] = replace(peer, endpoint=None)
    assert [found for _ in range(100) for found in differences(machine.kernel, plan)] == []


def test_a_peer_by_name_is_there_and_goes_nowhere(machine: Machine) -> None:
    """The kernel knows no names: such a peer has no endpoint, gets one when an address is written, and neither is a difference."""
    plan = mesh(machine.tag, 1)
    [peer] = peers_of(plan)
    plan[peer.key] = replace(peer, endpoint=Endpoint("gw-c.example.invalid:51871"))
    for endpoint in (None, peer.endpoint):
        wanted = {**plan, peer.key: replace(peer, endpoint=endpoint)}
        converge(machine.kernel, wanted)
        machine.kernel.write(Change(None, wanted[peer.key]))
        assert differences(machine.kernel, plan) == []
        [seen] = machine.kernel.peers(peer.link)
        assert seen.endpoint == endpoint


def test_peers_are_seen_as_they_are(machine: Machine) -> None:
    """Where each is, when it shook hands last and what it has carried; nothing of a link that is none."""
    plan = mesh(machine.tag, 3)
    converge(machine.kernel, plan)
    seen = machine.kernel.peers(tunnel(machine.tag, 5))
    assert {(item.public_key, item.endpoint) for item in seen} == {(item.public_key, item.endpoint) for item in peers_of(plan)}
    assert [item for item in seen if item.handshake_s or item.received_bytes] == []
    assert list(machine.kernel.peers("mt.gone")) == []


@pytest.mark.privileged
@pytest.mark.parametrize("machine", ["linux"], indirect=True)
def test_a_device_is_asked_no_more_often_for_many_peers(machine: LinuxMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is answered with all peers: one for each of them would take the square of their number."""
    asked: list[str] = []
    for implementation in (Userspace, KernelModule):

        def get(self: Implementation, name: str, answer: Callable[..., DeviceState] = implementation.get) -> DeviceState:
            asked.append(name)
            return answer(self, name)

        monkeypatch.setattr(implementation, "get", get)

    def questions(count: int, number: int) -> list[int]:
        plan = mesh(machine.tag, count, number)
        link = next(item for item in plan.values() if isinstance(item, WireguardLink))
        machine.kernel.write(Change(None, link))
        found = []
        asked.clear()
        assert dict(machine.kernel.write_all([Change(None, item) for item in peers_of(plan)])) == {}
        found.append(asked.count(link.name))
        known.update(plan)
        asked.clear()
        assert differences(machine.kernel, known) == []
        return [*found, asked.count(link.name)]

    known: dict[str, PlanObject] = {}
    few = questions(20, 5)
    assert min(few) > 0
    assert questions(200, 6) == few
