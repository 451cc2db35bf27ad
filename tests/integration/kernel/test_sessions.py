"""WireGuard sessions between two hosts: what changes about peers costs no packet, and what a device learned is left alone."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest
from msgspec.structs import replace

from schemas.host_objects import PlanObject, WireguardPeer
from schemas.values import Prefix
from services.kernel.transaction import Change
from tests.contract.kernel.gateway_plan import PEERS, tunnel
from tests.contract.kernel.machines import LinuxMachine, differences
from tests.integration.kernel.test_hosts import connected, wait_for

pytestmark = pytest.mark.privileged
FAR = "10.1.0.1"
PACKETS = 1000
REKEY_TIMEOUT_S = 5.0
"""WireGuard's, between two greetings of a peer."""


def peer_of(plan: dict[str, PlanObject]) -> WireguardPeer:
    return next(item for item in plan.values() if isinstance(item, WireguardPeer))


def narrowed(machine: LinuxMachine, other: LinuxMachine) -> dict[str, PlanObject]:
    """Two connected hosts, the far one with an address behind the tunnel; the first one's plan, with one prefix for it."""
    plan = connected(machine, other)
    old = peer_of(plan)
    new = replace(old, allowed_ips=(Prefix("10.1.0.0/16"), Prefix("169.254.1.2/32")))
    machine.kernel.write(Change(old, new))
    other.run(f"ip addr add {FAR}/32 dev lo; ip link set lo up")
    machine.run(f"ip route add 10.1.0.0/16 dev {tunnel(machine.tag)}")
    return {**plan, new.key: new}


def test_prefixes_that_come_and_go_cost_the_others_nothing(machine: LinuxMachine, other: LinuxMachine) -> None:
    """While a peer gets and loses a second prefix, and gives it to another peer and takes it back, no packet to its first one is lost.

    Each packet is sent when the one before it has arrived: what is lost is lost by the changes, and not in a queue.
    """
    plan = narrowed(machine, other)
    peer = peer_of(plan)
    more = replace(peer, allowed_ips=(*peer.allowed_ips, Prefix("10.2.0.0/16")))
    second = WireguardPeer(peer.link, PEERS[0], None, (Prefix("10.2.0.0/16"),))
    done = threading.Event()
    lost: list[int] = []
    far = other._thread.submit(lambda: opened((FAR, 7000))).result(10)
    near = machine._thread.submit(lambda: opened(("169.254.1.1", 0))).result(10)

    def talk() -> None:
        for number in range(PACKETS):
            try:
                near.sendto(number.to_bytes(4, "big"), (FAR, 7000))
                far.recv(10)
            except OSError:
                lost.append(number)
        done.set()

    changes = 0
    with closing(far), closing(near):
        thread = threading.Thread(target=talk)
        thread.start()
        while not done.is_set():
            for change in (Change(peer, more), Change(None, second), Change(second, None), Change(peer, more), Change(more, peer)):
                machine.kernel.write(change)
                changes += 1
        thread.join()
    assert lost == []
    assert changes > 4
    assert differences(machine.kernel, plan) == []


def opened(place: tuple[str, int]) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(1)
    made.bind(place)
    return made


def test_a_peer_that_roams_is_followed_and_never_overwritten(machine: LinuxMachine, other: LinuxMachine) -> None:
    """With no endpoint planned or another, a hundred re-applies write nothing: the device sends to where its peer spoke from last."""
    plan = connected(machine, other)
    peer, link = peer_of(plan), tunnel(machine.tag)
    open_ended = {**plan, peer.key: replace(peer, endpoint=None)}
    other.run(f"wg set {tunnel(other.tag)} listen-port 51999")
    wait_for(lambda: "192.0.2.2:51999" in machine.run(f"wg show {link} endpoints"))
    before = machine.run(f"wg show {link} latest-handshakes")
    found = [change for _ in range(100) for wanted in (open_ended, plan) for change in differences(machine.kernel, wanted)]
    assert found == []
    for wanted in (open_ended, plan):
        assert dict(machine.kernel.write_all([Change(wanted[peer.key], peer_of(wanted))])) == {}
    assert "192.0.2.2:51999" in machine.run(f"wg show {link} endpoints")
    assert machine.run(f"wg show {link} latest-handshakes") == before
    [seen] = machine.kernel.peers(link)
    assert seen.endpoint == "192.0.2.2:51999"


def test_a_link_gets_another_mtu_without_losing_its_session(machine: LinuxMachine, other: LinuxMachine) -> None:
    """MTU and mark are corrected on the live device: same handshake, same peer."""
    plan = connected(machine, other)
    link = tunnel(machine.tag)
    before = machine.run(f"wg show {link} latest-handshakes")
    machine.run(f"ip link set {link} mtu 1300; wg set {link} fwmark 7")
    [change] = differences(machine.kernel, plan)
    machine.kernel.write(change)
    assert differences(machine.kernel, plan) == []
    assert machine.run(f"wg show {link} latest-handshakes") == before


def test_a_peer_that_was_greeted_too_early_is_greeted_again_at_once(machine: LinuxMachine, other: LinuxMachine) -> None:
    """A greeting is lost; WireGuard's next one would be five seconds later. Who has shaken hands is left alone."""
    plan = connected(machine, other)
    link, old = tunnel(machine.tag), peer_of(plan)
    peer = replace(old, keepalive_seconds=0)
    other.run("nft 'table inet lost { chain c { type filter hook input priority 0; udp dport 51900 drop; }; }'")
    machine.kernel.write(Change(old, None))
    machine.kernel.write(Change(None, peer))
    with closing(machine._thread.submit(lambda: opened(("169.254.1.1", 0))).result(10)) as near:
        near.sendto(b"lost", ("169.254.1.2", 7000))
    wait_for(lambda: machine.kernel.peers(link)[0].sent_bytes > 0)
    other.run("nft delete table inet lost")
    began_s = time.monotonic()
    machine.kernel.greet(link, [peer.public_key])
    wait_for(lambda: machine.kernel.peers(link)[0].handshake_s > 0)
    assert time.monotonic() - began_s < REKEY_TIMEOUT_S - 1
    assert differences(machine.kernel, {**plan, peer.key: peer}) == []
    [before] = machine.kernel.peers(link)
    machine.kernel.greet(link, [peer.public_key])
    assert machine.kernel.peers(link)[0].handshake_s == before.handshake_s
