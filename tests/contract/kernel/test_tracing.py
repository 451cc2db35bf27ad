"""Flows that the kernel tells of for a while: beside any plan, no difference to it, and gone with whoever asked."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.commands import TraceFlow
from schemas.host_objects import TRACE_GROUP, TRACE_PREFIX, TRACE_TABLE
from schemas.values import Address
from services.cli.lab import namespaces
from services.kernel import trace_table
from services.kernel.listening import datagrams, listening
from services.kernel.netlink import NETLINK_NETFILTER
from services.kernel.nflog import group_socket, shown
from services.kernel.nfnetlink.engine import mapped
from services.kernel.nfnetlink.exchange import Exchange
from services.kernel.nftrace import GROUP, trace_events
from services.kernel.trace_rules import SESSIONS_MAX
from services.planner.compile import uplinks
from services.runtime.errors import Conflict
from services.runtime.settings import NftEngineName
from tests.contract.kernel.machines import OVER_BOTH_ENGINES, LinuxMachine, Machine, converge, differences
from tests.topologies import node

PLAN = {item.key: item for item in uplinks.objects(node("worker-1", 1))}
ENDS = (Address("127.0.0.1"), Address("127.0.0.2"), Address("::1"))
WISH = TraceFlow(ENDS, (Address("172.18.0.11"), Address("172.18.0.12")), (51871, 4789), 60, overlay_ports=(4789,))
OTHER = replace(WISH, flow=(Address("10.0.0.1"), Address("10.0.0.2")))


@OVER_BOTH_ENGINES
def test_what_is_traced_is_no_difference(machine: Machine) -> None:
    """Neither while it is, nor when it is asked for again or one of two ends, and the plan goes beside it."""
    converge(machine.kernel, PLAN)
    machine.kernel.trace(WISH)
    machine.kernel.trace(replace(WISH, seconds=30))
    machine.kernel.trace(OTHER)
    assert differences(machine.kernel, PLAN) == []
    assert dict(machine.kernel.read(PLAN)) == dict(machine.kernel.reference(PLAN))
    converge(machine.kernel, {})
    assert dict(machine.kernel.read({})) == {}


@OVER_BOTH_ENGINES
def test_what_is_traced_is_limited(machine: Machine) -> None:
    """Each flow is some rules that all packets meet; one that is traced already is none more."""
    for number in range(SESSIONS_MAX):
        machine.kernel.trace(replace(WISH, flow_ports=(number + 1,)))
    machine.kernel.trace(replace(WISH, flow_ports=(1,), seconds=90))
    with pytest.raises(Conflict, match="wait"):
        machine.kernel.trace(replace(WISH, flow_ports=(SESSIONS_MAX + 1,)))
    assert (machine.kernel.forget_traced() or 0) > 50


@pytest.fixture(params=["nfnetlink", "libnftables"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LinuxMachine]:
    engine: NftEngineName = request.param
    machine = LinuxMachine(tmp_path, engine)
    try:
        machine.run("ip link set lo up")
        yield machine
    finally:
        machine.close()


def tables(host: LinuxMachine) -> str:
    return host.run("nft list tables")


@pytest.mark.privileged
def test_nothing_is_left_of_who_is_gone(host: LinuxMachine) -> None:
    """However its process ends, the kernel closes its sockets."""
    host.kernel.trace(WISH)
    assert TRACE_TABLE in tables(host)
    host.restart()
    assert TRACE_TABLE not in tables(host)


@pytest.mark.privileged
def test_nothing_is_left_once_the_time_is_over(host: LinuxMachine) -> None:
    """The table is there as long as a flow is traced, and what a flow that ended had in it is not."""
    host.kernel.trace(replace(WISH, seconds=1))
    host.kernel.trace(replace(OTHER, seconds=5))  # a listing takes a second where this kernel is emulated
    seen: list[tuple[bool, bool]] = []
    end = time.monotonic() + 20
    while (left_s := host.kernel.forget_traced()) is not None:
        assert time.monotonic() < end
        assert left_s <= 5
        listed = host.run(f"nft list table inet {TRACE_TABLE}")
        seen.append(("@flows_1" in listed, "@flows_2" in listed))
        time.sleep(0.02)
    assert sorted(set(seen), key=seen.index)[-2:] == [(True, True), (False, True)]
    assert TRACE_TABLE not in tables(host)


@pytest.mark.privileged
def test_elements_end_by_themselves(host: LinuxMachine) -> None:
    """An applier that hangs has nothing more told of the flow."""
    host.kernel.trace(replace(WISH, seconds=1))
    end = time.monotonic() + 20
    while "expires" in host.run(f"nft list table inet {TRACE_TABLE}"):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.privileged
def test_a_longer_time_is_given_and_none_is_taken(host: LinuxMachine) -> None:
    """Two may trace one flow."""
    host.kernel.trace(replace(WISH, seconds=300))
    host.kernel.trace(replace(WISH, seconds=1))
    assert 290 < (host.kernel.forget_traced() or 0) <= 300
    host.kernel.trace(replace(WISH, seconds=600))
    assert 590 < (host.kernel.forget_traced() or 0) <= 600
    assert "@flows_1 " not in host.run(f"nft list table inet {TRACE_TABLE}")


@pytest.mark.privileged
def test_a_table_in_the_way_is_replaced(host: LinuxMachine) -> None:
    """One of the name that is nobody's, as of somebody who tried it by hand. To an audit it is a table that no plan has."""
    host.run(f"nft add table inet {TRACE_TABLE}")
    assert list(host.kernel.read({})) == [f"table {TRACE_TABLE}"]
    host.kernel.trace(WISH)
    assert list(host.kernel.read({})) == []
    with pytest.raises(AssertionError, match="not permitted"):
        host.run(f"nft delete table inet {TRACE_TABLE}")


@pytest.mark.privileged
def test_an_overlays_packet_is_shown_by_the_rule_that_tells_of_it(host: LinuxMachine) -> None:
    """Once, though two flows ask for it, with as much of it as holds what is inside; another's is only told of."""
    outer, ports = ENDS[:2], (6081, 4789)
    with ExitStack() as stack:
        listener = stack.enter_context(namespaces.inside(host.namespace, lambda: listening(NETLINK_NETFILTER, (GROUP,), 1 << 20)))
        group = stack.enter_context(namespaces.inside(host.namespace, lambda: group_socket(TRACE_GROUP)))
        sender = stack.enter_context(namespaces.inside(host.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        sender.bind((ENDS[0], 40000))
        for flow in (OTHER.flow, (Address("10.0.0.3"), Address("10.0.0.4"))):
            assert host.kernel.trace(replace(WISH, flow=flow, outer=outer, ports=ports, overlay_ports=(4789,)))
        for port in ports:
            sender.sendto(bytes(300), (ENDS[1], port))
        packets = [item for data in datagrams(group, 1 << 16) for item, _ in shown(data or b"")]
        events = [event for data in datagrams(listener, 1 << 16) for event in trace_events(data or b"")]
    assert [(item.prefix, len(item.data), bool(item.iif)) for item in packets] == [(TRACE_PREFIX, 192, False), (TRACE_PREFIX, 192, True)]
    begun = [event for event in events if event.kind == "rule" and event.chain in ("leaving", "arriving")]
    assert {(int.from_bytes(event.transport[2:4]), event.verdict) for event in begun if event.transport} == {
        (6081, "continue"),
        (4789, "accept"),
    }


@pytest.mark.privileged
def test_a_kernel_that_cannot_show_packets_tells_of_them(host: LinuxMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without NFLOG refuses rules that show; it is asked again for each table, not for each flow."""
    send, asked = trace_table._send, list[bool]()

    def refusing(exchange: Exchange, messages: list[bytes]) -> None:
        shows = any(b"log\0" in each for each in messages)
        asked.append(shows)
        if shows:
            raise mapped(errno.ENOENT, "nft: cannot trace")
        send(exchange, messages)

    monkeypatch.setattr(trace_table, "_send", refusing)
    assert [host.kernel.trace(wish) for wish in (WISH, replace(OTHER, overlay_ports=()))] == [False, True]
    listed = host.run(f"nft list table inet {TRACE_TABLE}")
    assert "@overlays_1" in listed
    assert "log" not in listed
    assert sum(asked) == 1
    monkeypatch.undo()
    host.restart()
    assert host.kernel.trace(WISH)


def told(host: LinuxMachine, wish: TraceFlow, **ports: int) -> set[str]:
    """Of which datagrams the kernel tells, sent from one end to a port of the other, each by what it is called."""
    with ExitStack() as stack:
        listener = stack.enter_context(namespaces.inside(host.namespace, lambda: listening(NETLINK_NETFILTER, (GROUP,), 1 << 20)))
        sender = stack.enter_context(namespaces.inside(host.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        sender.bind((ENDS[0], 40000))
        host.kernel.trace(wish)
        for port in ports.values():
            sender.sendto(b"x", (ENDS[1], port))
        events = [event for data in datagrams(listener, 1 << 16) for event in trace_events(data or b"")]
    udp = bytes((socket.IPPROTO_UDP,))
    found = {int.from_bytes(event.transport[2:4]) for event in events if event.network[9:10] == udp}
    return {name for name, port in ports.items() if port in found}


@pytest.mark.privileged
@pytest.mark.parametrize(
    "fields,expected",
    [
        ({}, {"one", "other"}),
        ({"protocols": ("udp",)}, {"one", "other"}),
        ({"protocols": ("tcp", "icmp")}, set()),
        ({"flow_ports": (5001, 5003)}, {"one"}),
        ({"flow_ports": (40000,)}, {"one", "other"}),
        ({"flow_ports": (5001,), "protocols": ("tcp",)}, set()),
    ],
)
def test_only_the_packets_that_are_meant_are_told_of(host: LinuxMachine, fields: dict[str, object], expected: set[str]) -> None:
    """By protocol, and by the port at either end."""
    assert told(host, replace(WISH, **fields), one=5001, other=5002) == expected  # type: ignore[arg-type]


@pytest.mark.privileged
@pytest.mark.parametrize("one_of", [1, 4, 64])
def test_one_packet_of_so_many_is_told_of(host: LinuxMachine, one_of: int) -> None:
    """Those whose identification can be divided by it: a socket counts its packets by it, and nothing on their way changes it."""
    with ExitStack() as stack:
        listener = stack.enter_context(namespaces.inside(host.namespace, lambda: listening(NETLINK_NETFILTER, (GROUP,), 8 << 20)))
        sender = stack.enter_context(namespaces.inside(host.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        receiver = stack.enter_context(namespaces.inside(host.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        sender.bind((ENDS[0], 0))
        receiver.bind((ENDS[1], 5001))
        sender.connect((ENDS[1], 5001))
        host.kernel.trace(replace(WISH, sample=one_of))
        for _ in range(64):
            sender.send(b"x")
        events = [event for data in datagrams(listener, 1 << 16) for event in trace_events(data or b"")]
    found = {int.from_bytes(event.network[4:6]) for event in events if event.network[9:10] == bytes((socket.IPPROTO_UDP,))}
    assert len(found) == 64 // one_of
    assert not any(number % one_of for number in found)
