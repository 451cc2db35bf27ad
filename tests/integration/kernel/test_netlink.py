"""Many netlink messages in one call to a real kernel: what was refused, and what when refusals are lost."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from schemas.host_objects import NextHop, Route
from schemas.values import Prefix
from services.kernel.interfaces import Interfaces
from services.kernel.netlink import CREATE, EXCL, NETLINK_ROUTE, NetlinkError, NetlinkSocket
from services.kernel.route_messages import NEWROUTE, Encoder
from services.kernel.routes import Routes
from services.kernel.transaction import Change
from tests.contract.kernel.machines import LinuxMachine

pytestmark = pytest.mark.privileged
ROUTES = [Route(7009, Prefix(f"10.9.{number}.0/24"), "blackhole") for number in range(250)]


@pytest.fixture
def netlink(machine: LinuxMachine) -> Iterator[NetlinkSocket]:
    made = machine._thread.submit(NetlinkSocket, NETLINK_ROUTE).result(5)
    yield made
    made.close()


def add(netlink: NetlinkSocket, routes: list[Route]) -> dict[int, NetlinkError]:
    return netlink.request_rows(NEWROUTE, Encoder({}).rows(routes).rows, CREATE | EXCL)


@pytest.mark.parametrize("at_once", [1, 7, 250, 5000])
def test_refusals_are_told_by_place(netlink: NetlinkSocket, at_once: int) -> None:
    """However many go in one system call, and with the last one or none refused."""
    netlink._refusals_max = at_once
    assert add(netlink, []) == {}
    assert add(netlink, ROUTES[::2]) == {}
    found = add(netlink, ROUTES)
    assert {place: error.errno for place, error in found.items()} == dict.fromkeys(range(0, 250, 2), errno.EEXIST)


def test_a_batch_larger_than_the_send_buffer_is_parted(netlink: NetlinkSocket) -> None:
    """By size, whatever the number of messages."""
    netlink._bytes_max = 300
    assert add(netlink, ROUTES) == {}
    assert len(add(netlink, ROUTES)) == 250


def overflowing(netlink: NetlinkSocket) -> None:
    """Room for few answers, unknown to the socket's owner."""
    netlink._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)


def test_lost_refusals_are_no_acceptance(netlink: NetlinkSocket) -> None:
    """Every message of the call has an error then; and the next request is answered as ever."""
    assert add(netlink, ROUTES) == {}
    overflowing(netlink)
    found = add(netlink, ROUTES)
    assert found.keys() == set(range(250))
    assert {error.errno for error in found.values()} == {errno.EEXIST, errno.ENOBUFS}
    assert add(netlink, ROUTES[:1])[0].errno == errno.EEXIST


def test_routes_whose_refusals_were_lost_are_sent_again(netlink: NetlinkSocket) -> None:
    """In the end it is known of each what became of it: here, that all are there."""
    overflowing(netlink)
    routes = Routes(netlink, Interfaces(netlink))
    changes = [Change(None, item) for item in ROUTES]
    assert routes.write_all(changes) == {}
    assert routes.write_all(changes) == {}


def test_routes_that_have_not_changed_are_not_made_anew(machine: LinuxMachine, netlink: NetlinkSocket) -> None:
    """Nor twice in memory where they are as planned; what has changed is read, and a link that has another name as well."""
    routes = Routes(netlink, Interfaces(netlink), remembers=True)
    machine.run("ip link add mm.a type veth peer name mm.p; ip link set mm.p up; ip link set mm.a up")
    by_link = Route(7009, Prefix("10.10.0.0/24"), hops=(NextHop("mm.a"),))
    wanted = {item.key: item for item in (*ROUTES, by_link)}
    assert routes.write_all([Change(None, item) for item in wanted.values()]) == {}
    first = routes.read(wanted)
    assert first == wanted
    assert all(first[key] is wanted[key] for key in wanted)
    again = routes.read()
    assert all(again[key] is wanted[key] for key in wanted)
    machine.run("ip route replace unreachable 10.9.7.0/24 table 7009 proto 77; ip link set mm.a down; ip link set mm.a name mm.b up")
    assert routes.write_all([Change(None, Route(7009, by_link.prefix, hops=(NextHop("mm.b"),)))]) == {}
    found = routes.read(wanted)
    assert {key for key in wanted if found[key] != wanted[key]} == {ROUTES[7].key, by_link.key}
    machine.run("ip link del mm.b")
