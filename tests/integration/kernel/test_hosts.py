"""What only a real host can show: connection tracking, handshakes, half-made devices, a shared socket folder."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.host_objects import LinkAddress, PlanObject, Sysctl, VxlanLink, WireguardLink, WireguardPeer
from schemas.values import IPV6, Address, Endpoint, Mac, Prefix
from services.kernel.events import route_events
from services.kernel.links import Links
from services.kernel.listening import listening
from services.kernel.netlink import NETLINK_ROUTE
from services.kernel.port import Flow
from services.kernel.transaction import Change
from services.kernel.uapi import socket_path
from services.runtime.errors import Conflict
from tests.contract.kernel.gateway_plan import PEERS, overlay, tunnel
from tests.contract.kernel.machines import LinuxMachine, converge, differences

pytestmark = pytest.mark.privileged
LIMIT_S = 10.0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.any_kernel
def test_flows_are_read_and_dropped_one_by_one(machine: LinuxMachine) -> None:
    """A UDP flow shows with its ports, and goes alone when asked to; a second request finds it gone."""
    machine.run("nft 'add table ip p; add chain ip p c { type filter hook output priority 0; }; add rule ip p c ct state new accept'")

    def talk() -> list[int]:
        ports = []
        for target in (9001, 9002):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"x", ("127.0.0.1", target))
                ports.append(sender.getsockname()[1])
        return ports

    ports = machine._thread.submit(talk).result(10)
    found = {flow.destination_port: flow for flow in machine.kernel.flows() if flow.protocol == socket.IPPROTO_UDP}
    here = Address("127.0.0.1")
    assert found[9001] == Flow(17, here, here, here, here, ports[0], 9001)
    assert machine.kernel.drop_flows([found[9001]]) == 1
    assert machine.kernel.drop_flows([found[9001]]) == 0
    assert 9002 in {flow.destination_port for flow in machine.kernel.flows()}


def connected(machine: LinuxMachine, other: LinuxMachine) -> dict[str, PlanObject]:
    """Two hosts on one cable, with a tunnel between them; the first one's plan."""
    machine.run(
        f"ip link add mo.v{machine.tag} type veth peer name mo.w{machine.tag} netns {other.namespace};"
        f"ip addr add 192.0.2.1/24 dev mo.v{machine.tag}; ip link set mo.v{machine.tag} up"
    )
    other.run(f"ip addr add 192.0.2.2/24 dev mo.w{machine.tag}; ip link set mo.w{machine.tag} up")
    plans = []
    for here, far, number in ((machine, other, 1), (other, machine, 2)):
        link = tunnel(here.tag)
        endpoint = Endpoint(f"192.0.2.{3 - number}:51900")
        items: list[PlanObject] = [
            WireguardLink(link, 51900, 1420),
            LinkAddress(link, Address(f"169.254.1.{number}"), 30),
            WireguardPeer(link, far.kernel.public_key(), endpoint, (Prefix("0.0.0.0/0"),), 1),
        ]
        plan = {item.key: item for item in items}
        converge(here.kernel, plan)
        plans.append(plan)
    wait_for(lambda: machine.run(f"wg show {tunnel(machine.tag)} latest-handshakes").split()[-1] != "0")
    return plans[0]


def test_the_last_handshake_of_a_tunnel_is_known(machine: LinuxMachine, other: LinuxMachine) -> None:
    """When two hosts have shaken hands, both know when."""
    began_s = time.time()
    connected(machine, other)
    for host in (machine, other):
        [peer] = host.kernel.peers(tunnel(host.tag))
        assert began_s - 1 <= peer.handshake_s <= time.time()
        assert peer.received_bytes
        assert peer.sent_bytes


def test_a_packet_goes_through_a_tunnel(machine: LinuxMachine, other: LinuxMachine) -> None:
    """What one host sends into its tunnel arrives at the other's end of it, from the tunnel's address."""
    connected(machine, other)

    def listen() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.settimeout(LIMIT_S)
        made.bind(("169.254.1.2", 7000))
        return made

    def speak() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"through", ("169.254.1.2", 7000))

    with closing(other._thread.submit(listen).result(10)) as far:
        machine._thread.submit(speak).result(10)
        data, (source, _) = far.recvfrom(100)
    assert (data, source) == (b"through", "169.254.1.1")


def test_a_learned_endpoint_is_no_difference_while_the_handshake_is_fresh(machine: LinuxMachine, other: LinuxMachine) -> None:
    """Two hosts shake hands; then one's peer is planned at another address: nothing to repair, and its session stays."""
    plan = connected(machine, other)
    [key] = [key for key in plan if key.startswith("peer ")]
    moved = {
        **plan,
        key: WireguardPeer(tunnel(machine.tag), other.kernel.public_key(), Endpoint("192.0.2.99:1"), (Prefix("0.0.0.0/0"),), 1),
    }
    assert differences(machine.kernel, moved) == []
    machine.kernel.write(Change(moved[key], moved[key]))
    assert "192.0.2.2:51900" in machine.run(f"wg show {tunnel(machine.tag)} endpoints")
    other.run(f"ip link set mo.w{machine.tag} down")  # or it would be learned anew at once
    machine.kernel.write(Change(plan[key], moved[key]))
    assert "192.0.2.99:1" in machine.run(f"wg show {tunnel(machine.tag)} endpoints")


def test_a_peer_has_as_many_allowed_ips_as_wanted(machine: LinuxMachine) -> None:
    """More than one message holds, written and read; then exactly those of the next plan."""
    link = WireguardLink(tunnel(machine.tag), 51901, 1420)
    machine.kernel.write(Change(None, link))
    old = None
    for count in (1500, 3):
        allowed = tuple(Prefix(f"10.{number // 256}.{number % 256}.0/24") for number in range(count))
        peer = WireguardPeer(link.name, PEERS[0], Endpoint("127.0.0.9:51840"), allowed)
        machine.kernel.write(Change(old, peer))
        assert machine.kernel.read({}, ["wireguard"]) == {peer.key: peer}
        old = peer


def test_a_wrong_endpoint_without_a_handshake_is_a_difference(machine: LinuxMachine, plan: dict[str, PlanObject]) -> None:
    """A device that never heard from its peer has learned nothing: its endpoint is to be the plan's."""
    converge(machine.kernel, plan)
    link = tunnel(machine.tag)
    key = next(key for key in plan if key.startswith(f"peer {link} "))
    machine.run(f"wg set {link} peer {key.split(' ')[2]} endpoint 127.0.0.77:7")
    found = differences(machine.kernel, plan)
    assert [change.key for change in found] == [key]
    machine.kernel.write(found[0])
    assert differences(machine.kernel, plan) == []


def test_a_device_with_another_key_is_a_difference(machine: LinuxMachine, plan: dict[str, PlanObject]) -> None:
    """A private key set by hand shows on the link, and the host's own key comes back without a new device."""
    converge(machine.kernel, plan)
    link = tunnel(machine.tag)
    machine.run(f"wg genkey | wg set {link} private-key /dev/stdin")
    found = differences(machine.kernel, plan)
    assert f"link {link}" in {change.key for change in found}
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []


def test_a_device_half_made_before_a_kill_is_adopted(machine: LinuxMachine, plan: dict[str, PlanObject]) -> None:
    """Between its making and its alias a device is down and nameless: the next start takes exactly that one, and no other."""
    item = plan[f"link {overlay(machine.tag)}"]
    machine.run(
        f"ip link add {item.name} address {item.mac} mtu {item.mtu} type vxlan id {item.vni} local {item.local} remote {item.remote} "  # type: ignore[union-attr]
        "dstport 4789 nolearning"
    )
    machine.kernel.write(Change(None, item))
    assert machine.kernel.read(plan, ["link"]) == {item.key: item}


@pytest.mark.parametrize("is_next", [False, True], ids=["the key in force", "the key that is to follow"])
def test_a_wireguard_device_half_made_before_a_kill_is_adopted(
    machine: LinuxMachine, *, is_next: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a port and one of the host's keys by then, but no alias: the next start takes it, whichever key that is."""
    machine.kernel.make_next_key()
    ring = machine.kernel.keys()
    item = WireguardLink(tunnel(machine.tag), 51901, 1420, ring.next if is_next else ring.key)

    def killed(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(Links, "finish", killed)
    with pytest.raises(InterruptedError):
        machine.kernel.write(Change(None, item))
    monkeypatch.undo()
    assert machine.kernel.read({item.key: item}, ["link"]) == {}
    machine.kernel.write(Change(None, item))
    assert machine.kernel.read({item.key: item}, ["link"]) == {item.key: item}


def test_a_device_that_only_looks_half_made_is_left_alone(machine: LinuxMachine, plan: dict[str, PlanObject]) -> None:
    """Another far end, and it is somebody else's."""
    item = plan[f"link {overlay(machine.tag)}"]
    machine.run(f"ip link add {item.name} type vxlan id {item.vni} local {item.local} remote 127.0.0.99 dstport 4789 nolearning")  # type: ignore[union-attr]
    with pytest.raises(Conflict):
        machine.kernel.write(Change(None, item))


def test_a_name_in_use_by_another_namespace_is_a_conflict(machine: LinuxMachine, other: LinuxMachine) -> None:
    """WireGuard's sockets share one folder: a device of that name elsewhere is never configured by mistake."""
    if machine.kernel.capabilities().wireguard != "userspace":
        pytest.skip("the kernel has WireGuard: no shared socket folder")
    item = WireguardLink(tunnel(machine.tag), 51901, 1420)
    machine.kernel.write(Change(None, item))
    with pytest.raises(Conflict):
        other.kernel.write(Change(None, item))
    assert socket_path(item.name).exists()
    assert dict(other.kernel.read({})) == {}


def test_the_private_key_is_for_root_alone(machine: LinuxMachine, tmp_path: Path) -> None:
    """The key file is made on first use with mode 0600."""
    machine.kernel.public_key()
    assert (tmp_path / "wireguard.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.any_kernel
def test_a_thousand_routes_are_read_in_one_pass(machine: LinuxMachine) -> None:
    """Bulk: routes of ours among many of others are found, and only those."""
    lines = "\n".join(
        f"route add blackhole 10.{number // 250}.{number % 250}.0/24 proto {77 if number % 2 else 4}" for number in range(1000)
    )
    machine.run(f"ip -batch - <<'END'\n{lines}\nEND")
    found = machine.kernel.read({}, ["route"])
    assert len(found) == 500


@pytest.mark.any_kernel
def test_a_kernel_stays_in_the_namespace_of_the_thread_that_made_it(machine: LinuxMachine) -> None:
    """Called from this thread, which is in another network namespace, it still reads and writes the machine's links."""
    item = VxlanLink(overlay(machine.tag, 7), 7, Address("127.0.0.1"), Address("127.0.0.2"), Mac("02:00:00:00:00:07"), 1400)
    kernel = machine.kernel._target  # type: ignore[attr-defined]
    kernel.write(Change(None, item))
    assert kernel.read({}, ["link"]) == {item.key: item}
    assert item.name in machine.run("ip -o link")


@pytest.mark.any_kernel
def test_a_change_of_ours_names_this_process(machine: LinuxMachine) -> None:
    """The port of the socket for links and addresses holds the process's number."""
    link = VxlanLink(overlay(machine.tag, 8), 8, Address("127.0.0.1"), Address("127.0.0.2"), Mac("02:00:00:00:00:08"), 1400)
    machine.kernel.write(Change(None, link))
    with closing(machine._thread.submit(listening, NETLINK_ROUTE, (5,), 1 << 16).result(10)) as listener:  # RTNLGRP_IPV4_IFADDR
        machine.kernel.write(Change(None, LinkAddress(link.name, Address("10.4.0.1"), 32)))
        [event] = route_events(listener.recv(1 << 16))
    assert (event.layer, event.pid) == ("address", os.getpid())


@pytest.mark.any_kernel
def test_a_thousand_flows_are_read(machine: LinuxMachine) -> None:
    """Bulk: every entry of the dump is there."""
    machine.run(TRACKED)
    ports = range(10_000, 11_000)
    machine._thread.submit(send, *ports).result(10)
    assert {flow.destination_port for flow in machine.kernel.flows()} >= set(ports)


@pytest.mark.any_kernel
def test_equal_flows_of_two_zones_go_one_by_one(machine: LinuxMachine) -> None:
    """The zone tells them apart, in what is read and in what is deleted."""
    for zone in (1, 2):
        machine.run(f"nft 'add table ip z; flush table ip z; {TRACKED_BY.format('raw', f'ct zone set {zone}')}'")
        machine._thread.submit(send, 9001, source=9000).result(10)
    first, second = sorted(flows(machine, socket.IPPROTO_UDP, 9001), key=lambda flow: flow.zone)
    assert (first.zone, second.zone) == (1, 2)
    assert replace(first, zone=0) == replace(second, zone=0)
    assert machine.kernel.drop_flows([second]) == 1
    assert flows(machine, socket.IPPROTO_UDP, 9001) == [first]


@pytest.mark.any_kernel
def test_an_icmp_flow_is_read_and_dropped(machine: LinuxMachine) -> None:
    """Its identifier stands in the source port, its type and code in the destination port."""
    machine.run(TRACKED)

    def echo() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sender:
            sender.sendto(struct.pack(">BBHHH", 8, 0, 0xF7FF - 0x1234 - 1, 0x1234, 1), ("127.0.0.1", 0))

    machine._thread.submit(echo).result(10)
    [found] = flows(machine, socket.IPPROTO_ICMP, 8 << 8)
    assert found.source_port == 0x1234
    assert machine.kernel.drop_flows([found]) == 1
    assert flows(machine, socket.IPPROTO_ICMP, 8 << 8) == []


@pytest.mark.any_kernel
def test_a_host_that_starts_to_forward_keeps_the_default_route_it_learned(machine: LinuxMachine, other: LinuxMachine) -> None:
    """A router's advertisement gives a host its way out; a plan that switches IPv6 forwarding on does not take it away."""
    uplink, far = f"up{machine.tag}", f"up{other.tag}"
    machine.run(f"ip link add {uplink} type veth peer name {far} netns {other.namespace}; ip link set {uplink} up")
    other.run(f"ip link set {far} up; sysctl -qw net.ipv6.conf.all.forwarding=1")

    def advertise() -> None:
        with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as router:
            router.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
            with contextlib.suppress(OSError):  # while its own address is still being looked for
                router.sendto(struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0), ("ff02::1", 0, 0, socket.if_nametoindex(far)))

    def learned() -> bool:
        other._thread.submit(advertise).result(10)
        return "default" in machine.run("ip -6 route show default proto ra")

    wait_for(learned)
    item = Sysctl("net/ipv6/conf/all/forwarding", "1")
    machine.kernel.write(Change(None, item))
    assert "default" in machine.run("ip -6 route show default proto ra")
    machine.kernel.write(Change(item, None))
    assert machine.sysctl(f"net/ipv6/conf/{uplink}/accept_ra") == "1"
    assert dict(machine.kernel.read({})) == {}


@pytest.mark.any_kernel
@pytest.mark.parametrize("protocol", [socket.IPPROTO_UDP, socket.IPPROTO_ICMPV6])
def test_ipv6_flows_are_read_and_dropped(machine: LinuxMachine, protocol: int) -> None:
    """By their addresses and ports, or an echo's identifier, beside an IPv4 flow that stays."""
    machine.run(TRACKED.replace("table ip z", "table inet z").replace("ip z c", "inet z c"))

    def speak() -> None:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM if protocol == socket.IPPROTO_UDP else socket.SOCK_RAW, protocol) as sender:
            echo = struct.pack(">BBHHH", 128, 0, 0, 0x1234, 1)
            sender.sendto(b"x" if protocol == socket.IPPROTO_UDP else echo, ("::1", 9001 if protocol == socket.IPPROTO_UDP else 0))

    machine._thread.submit(speak).result(10)
    machine._thread.submit(send, 9001).result(10)
    [found] = [flow for flow in machine.kernel.flows() if flow.source.family == IPV6 and flow.protocol == protocol]
    assert (found.source, found.destination) == ("::1", "::1")
    echoed = (found.source_port, found.destination_port) == (0x1234, 128 << 8)
    assert echoed or (protocol, found.destination_port) == (socket.IPPROTO_UDP, 9001)
    assert machine.kernel.drop_flows([found, found]) == 1
    assert found not in machine.kernel.flows()
    assert flows(machine, socket.IPPROTO_UDP, 9001)


TRACKED_BY = "add chain ip z c {{ type filter hook output priority {0}; }}; add rule ip z c {1}"
TRACKED = f"nft 'add table ip z; {TRACKED_BY.format('filter', 'ct state new accept')}'"


def flows(machine: LinuxMachine, protocol: int, port: int) -> list[Flow]:
    return [flow for flow in machine.kernel.flows() if (flow.protocol, flow.destination_port) == (protocol, port)]


def send(*targets: int, source: int = 0) -> None:
    """A datagram to each of these ports of this network namespace, to sockets that nobody has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind(("127.0.0.1", source))
        for target in targets:
            sender.sendto(b"x", ("127.0.0.1", target))
