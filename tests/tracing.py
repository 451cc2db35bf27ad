"""Traces in a test's mesh: hosts are lent what a trace needs, and what their kernels tell is recorded and read as the auditor reads it."""

from __future__ import annotations

import base64
import itertools
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import TraceFlow
from schemas.flow import FlowEvent, Layer4
from schemas.host_objects import TRACE_GROUP
from schemas.plan import HostPlan
from schemas.values import Address, Family
from services.auditor.trace.flows import Flows
from services.auditor.trace.inners import Inners
from services.auditor.trace.passages import Passages
from services.auditor.trace.trails import Trail
from services.auditor.trace.verdicts import courses, judged
from services.auditor.trace.view import view_of
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX, host_namespace
from services.cli.trace import forms
from services.cli.trace.ends import Session
from services.kernel.listening import datagrams, listening
from services.kernel.netlink import NETLINK_NETFILTER
from services.kernel.nflog import group_socket, shown
from services.kernel.nftrace import GROUP, trace_events
from services.planner.state import HostId
from services.runtime.errors import Conflict
from tests.hosts import LinuxHost

_BUFFER_BYTES = 4 << 20
_BEGIN_S = 1_000_000_000.0
_SHOWN = "shown"
_HANDLE = re.compile(r"handle \d+")


ONE, TWO, THREE = (HostId("rome", f"worker-{number}") for number in (1, 2, 3))
PODS = {
    "shop": (Address("10.200.1.10"), Address("fd00:200:0:1::10")),
    "stock": (Address("10.200.2.10"), Address("fd00:200:0:2::10")),
    "post": (Address("10.200.3.10"), Address("fd00:200:0:3::10")),
    "worker-2": (Address("172.18.0.12"), Address("2001:db8:18::12")),
}


class Case(Struct, frozen=True):
    """A cluster's fields, a host whose rules of these priorities go, who speaks to whom in which family.

    With `outer`, the underlay has this family alone.
    """

    cluster: dict[str, object] = {}
    broken: tuple[HostId, tuple[int, ...]] | None = None
    source: str = "shop"
    to: str = "stock"
    family: Family = 4
    outer: Family | None = None
    answered: bool = True


CASES = {
    "native": Case(),
    "native-ipv6": Case(family=6),
    "overlay": Case({"routing": "overlay"}),
    "overlay-in-clear": Case({"routing": "overlay", "encryption": "none", "strict": "off"}),
    "opted-out": Case(to="post"),
    "reply-in-clear": Case(broken=(TWO, (1000,))),
    "dropped": Case({"strict": "enforce"}, broken=(ONE, (1000, 1001)), answered=False),
}


def address(case: Case) -> Address:
    return PODS[case.to][0 if case.family == 4 else 1]


class Recorded(Struct):
    """What a kernel told, as datagrams with when they came (seconds), its links by number, and the datagrams that show packets.

    Of what was told by then, all has been shown: what shows a packet is not later than what tells of it.
    """

    links: dict[int, str]
    datagrams: list[tuple[float, bytes]]
    shown: list[tuple[float, bytes]] = []

    def write(self, path: Path) -> None:
        """A line of links, then one for each datagram; those that show packets say so."""
        lines = [" ".join(f"{number}={name}" for number, name in sorted(self.links.items()))]
        lines += [f"{at_s:.6f} {base64.b64encode(data).decode()}" for at_s, data in self.datagrams]
        lines += [f"{at_s:.6f} {base64.b64encode(data).decode()} {_SHOWN}" for at_s, data in self.shown]
        path.write_text("\n".join(lines) + "\n", encoding="ascii")

    @classmethod
    def read(cls, path: Path) -> Recorded:
        first, *rest = path.read_text(encoding="ascii").splitlines()
        links = {int(number): name for number, _, name in (word.partition("=") for word in first.split())}
        found: dict[bool, list[tuple[float, bytes]]] = {False: [], True: []}
        for at_s, data, *what in (line.split(" ") for line in rest):
            found[what == [_SHOWN]].append((float(at_s), base64.b64decode(data)))
        return cls(links, found[False], found[True])


def flows(plan: HostPlan, recorded: Recorded, comment: str = "") -> list[FlowEvent]:
    """The flow events of what was recorded; uuids are counted from 1 on each host. `comment` is that of each rule that dropped."""
    numbers = itertools.count(1)
    made = Flows(
        view_of(plan),
        plan.because,
        lambda index: recorded.links.get(index, ""),
        lambda: f"{plan.cluster}/{plan.host}-{next(numbers)}",
        lambda _: comment,
    )
    passages, inners, found, at_s = Passages(), Inners(), list[FlowEvent](), _BEGIN_S
    waiting = deque(recorded.shown)
    for at_s, data in recorded.datagrams:
        while waiting and waiting[0][0] <= at_s:
            inners.show((item for item, _ in shown(waiting.popleft()[1])), _BEGIN_S + at_s)
        for event in trace_events(data):
            for passage in passages.hear(event, _BEGIN_S + at_s, inners.of(event)):
                found += made.of(passage)
    for passage in passages.idle(_BEGIN_S + at_s + 1):
        found += made.of(passage)
    return found


class Recorder:
    """Listens to the kernels of hosts, and lends them what a trace needs.

    Each has a socket for what is told, and one for what is shown, None where an auditor is shown that already.
    """

    def __init__(self, hosts: dict[HostId, LinuxHost], sockets: dict[HostId, tuple[socket.socket, socket.socket | None]]) -> None:
        self._hosts = hosts
        self._sockets = sockets
        self._began_s = time.time()
        self.found = {host: Recorded(_links(hosts[host]), []) for host in hosts}

    def lend(self, wish: TraceFlow) -> None:
        for host in self._hosts.values():
            host.trace(wish)

    def take(self) -> None:
        """Read what has come until now."""
        for host, (telling, showing) in self._sockets.items():
            first_s = time.time() - self._began_s
            told = [(time.time() - self._began_s, data) for data in datagrams(telling, 1 << 16) if data]
            self.found[host].datagrams += told
            if showing is not None:
                self.found[host].shown += [(first_s, data) for data in datagrams(showing, 1 << 16) if data]


@contextmanager
def recording(hosts: dict[HostId, LinuxHost]) -> Iterator[Recorder]:
    """Listen to these hosts while the body runs."""
    with ExitStack() as stack:
        sockets: dict[HostId, tuple[socket.socket, socket.socket | None]] = {}
        for host in hosts:
            telling = namespaces.inside(host_namespace(*host), lambda: listening(NETLINK_NETFILTER, (GROUP,), _BUFFER_BYTES))
            stack.enter_context(telling)
            sockets[host] = telling, None
            with suppress(Conflict):
                showing = namespaces.inside(host_namespace(*host), lambda: group_socket(TRACE_GROUP))
                sockets[host] = telling, stack.enter_context(showing)
        yield Recorder(hosts, sockets)


def echo(place: str, to: Address, recorder: Recorder, count: int = 1, ident: int = 77) -> int:
    """Send ICMP echo requests, one after the other; returns how many were answered. What hosts tell is read meanwhile."""
    family, protocol, kind = (socket.AF_INET6, socket.IPPROTO_ICMPV6, 128) if ":" in to else (socket.AF_INET, socket.IPPROTO_ICMP, 8)
    answered = 0
    with namespaces.inside(f"{PREFIX}{place}", lambda: socket.socket(family, socket.SOCK_RAW, protocol)) as opened:
        opened.settimeout(0.001)
        for sequence in range(1, count + 1):
            opened.sendto(_request(kind, ident, sequence), (to, 0))
            answered += _is_answered(opened, recorder, ident, sequence)
    recorder.take()
    return answered


def _is_answered(opened: socket.socket, recorder: Recorder, ident: int, sequence: int, patience_s: float = 2.0) -> bool:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        recorder.take()
        try:
            data = opened.recv(2048)
        except TimeoutError:
            continue
        message = data[20:] if data[0] >> 4 == 4 else data
        if message[0] in (0, 129) and struct.unpack_from("!HH", message, 4) == (ident, sequence):
            return True
    return False


def _request(kind: int, ident: int, sequence: int) -> bytes:
    data = struct.pack("!BBHHH", kind, 0, 0, ident, sequence) + bytes(56)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return data[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + data[4:]


def _links(host: LinuxHost) -> dict[int, str]:
    found = (line.split(": ", 2) for line in host.run("ip", "-o", "link").splitlines())
    return {int(number): name.partition("@")[0] for number, name, _ in found}


def drawn(found: Sequence[Trail], wanted: Session) -> str:
    """Points line by line in the compact form, then each direction's path, without what differs from run to run."""
    names: dict[str, int] = {}
    lines = [forms.compact(event, way, wanted) for way, event in judged(_normal(found, names))]
    lines = [line[line.index("[", 1) if line[0] != "[" else 0 :].removeprefix("\\") for line in lines]
    text = "\n".join([*lines, "", *forms.paths(list(_normal(found, {})), courses(found), wanted)]) + "\n"
    return _HANDLE.sub("handle N", text)


def _normal(found: Iterable[Trail], names: dict[str, int]) -> Iterator[Trail]:
    """Trails without what kernels choose by chance: receiver indices are called by their order, counters are 0, and so an overlay's source
    port, which is a hash, is 1.
    """
    for trail in found:
        outer = [replace(link, event=_plain(link.event, names)) for link in trail.outer]
        yield Trail(trail.way, trail.corr, [_plain(event, names) for event in trail.seen], outer, trail.route, trail.swallowed)


def _plain(event: FlowEvent, names: dict[str, int]) -> FlowEvent:
    if event.wg is not None and event.wg.counter is not None:
        index = names.setdefault(f"index {event.wg.receiver_index}", len(names) + 1)
        event = replace(event, wg=replace(event.wg, receiver_index=index, counter=0))
    if event.tunnel is not None and event.tunnel.l4.udp is not None:
        event = replace(event, tunnel=replace(event.tunnel, l4=Layer4(udp=replace(event.tunnel.l4.udp, source_port=1))))
    return event
