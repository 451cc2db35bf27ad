"""1,000 and 10,000 routes: added, read and compared with what is wanted, and looked at where nothing has changed.

Routes to single addresses by one neighbour, in a table of their own. Added: from plan objects to the kernel, by the drivers that the
applier uses, links looked up and refusals attributed. Compared: read, as plan objects, and compared with the wanted ones. Unchanged: what
the auditor asks for when it had found nothing before. The clock is processor time.

Floor: the same messages, made beforehand, in one send; a dump that is received and not looked at. Peer: ``ip -batch`` with the lines made
beforehand, and ``ip -j route``, not parsed. pyroute2, which takes many times the floor, has its turn in every fourth round; it is in the
details. Variants take turns. Goal: 1.2 times the floor, and half of the peer's time: whichever is less.
"""

from __future__ import annotations

import gc
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from pyroute2 import IPRoute

from benchmarks.bare_netlink import BareNetlink, in_new_network, spent_ms, train
from benchmarks.result import Details, Figure, Result, median, result, rounded
from schemas.host_objects import OWN_PROTOCOL, NextHop, Route
from schemas.values import Address, Prefix
from services.kernel.interfaces import Interfaces
from services.kernel.linux import LinuxKernel
from services.kernel.netlink import CREATE, EXCL, NETLINK_ROUTE, NetlinkSocket
from services.kernel.route_messages import DELROUTE, GETROUTE, INFO, NEWROUTE, Encoder
from services.kernel.transaction import Change, repairs
from services.runtime.errors import Permanent

_SIZES = {1_000: 15, 10_000: 7}
"""How many rounds are measured at each number of routes."""
_PYROUTE2_EVERY = 4
_TABLE = 7002
_LINK, _NEIGHBOUR = "bench0", Address("10.0.0.2")
_SETUP = f"""
link set lo up
link add {_LINK} type veth peer name bench1
link set {_LINK} up
link set bench1 up
address add 10.0.0.1/24 dev {_LINK}
"""
_GOAL_FLOOR, _GOAL_PEER = 1.2, 0.5
_OWN_IPV4 = INFO.pack(socket.AF_INET, 0, 0, 0, 0, OWN_PROTOCOL, 0, 0, 0)

Note = Callable[[str, Callable[[], object]], None]
"""Measures some work and keeps how long it took, by what it is."""
Samples = Mapping[str, list[float]]
"""Milliseconds by what was measured."""


def run(say: Callable[[str], None]) -> list[Result]:
    found: list[Result] = []
    for size, rounds in _SIZES.items():
        samples = in_new_network(lambda size=size, rounds=rounds: _measure(size, rounds))  # type: ignore[misc]
        say(f"{size} routes in {rounds} rounds")
        found += summed_up(size, samples)
    return found


def routes(count: int) -> list[Route]:
    hops = (NextHop(_LINK, _NEIGHBOUR, onlink=True),)
    addresses = (f"10.{100 + (number >> 16)}.{number >> 8 & 0xFF}.{number & 0xFF}" for number in range(count))
    return [Route(_TABLE, Prefix(f"{address}/32"), hops=hops) for address in addresses]


def summed_up(size: int, samples: Samples) -> list[Result]:
    """A figure for each thing that is done."""
    return [
        _result(f"routes-{done}-{size}", samples[done], median(samples[f"{done} floor"]), median(samples[f"{done} peer"]), samples)
        for done in ("add", "compare", "unchanged")
    ]


def _result(name: str, taken: Sequence[float], floor: float, peer: float, samples: Samples) -> Result:
    details: Details = {f"{what} ms": rounded(median(values)) for what, values in samples.items()}
    return result(name, taken, "ms", floor=floor, peer=peer, goal=rounded(min(_GOAL_FLOOR * floor, _GOAL_PEER * peer)), details=details)


def _measure(size: int, rounds: int) -> Samples:
    _ip(_SETUP)
    wanted = {item.key: item for item in routes(size)}
    bare, netlink = BareNetlink(NETLINK_ROUTE), NetlinkSocket(NETLINK_ROUTE)
    encoder = Encoder(Interfaces(netlink).all())
    bodies = [encoder.body(item) for item in wanted.values()]
    ready = train(NEWROUTE, bodies, CREATE | EXCL)
    lines = "".join(f"route add {item.prefix} via {_NEIGHBOUR} dev {_LINK} onlink table {_TABLE} protocol 77\n" for item in wanted.values())
    samples: dict[str, list[float]] = {}
    with TemporaryDirectory(prefix="meshmark-bench-") as folder:
        kernel = LinuxKernel(Path(folder), remembers=True)
        changes = [Change(None, item) for item in wanted.values()]

        def note(what: str, work: Callable[[], object]) -> None:
            samples.setdefault(what, []).append(spent_ms(work))

        def clear() -> None:
            if netlink.request_all(DELROUTE, bodies):
                msg = "not all routes were there"
                raise Permanent(msg)

        for number in range(rounds):
            for what, work in (
                ("add floor", lambda: bare.send(ready)),
                ("add", lambda: _without_errors(kernel.write_all(changes))),
                ("add peer", lambda: _ip(lines)),
            ):
                note(what, work)
                if what == "add":
                    _compare(kernel, wanted, bare, note)
                clear()
            if number % _PYROUTE2_EVERY == 0:
                with IPRoute() as library:
                    note("add by pyroute2", lambda library=library: _add_by_pyroute2(library, wanted.values()))  # type: ignore[misc]
                    note("dump by pyroute2", lambda library=library: _dump_by_pyroute2(library, size))  # type: ignore[misc]
                clear()
                gc.collect()  # what pyroute2 leaves is not to be collected in somebody else's turn
        kernel.close()
    bare.close()
    netlink.close()
    return samples


def _compare(
    kernel: LinuxKernel, wanted: Mapping[str, Route], bare: BareNetlink, note: Callable[[str, Callable[[], object]], None]
) -> None:
    """Measure what is done with routes that are there."""

    def compared() -> None:
        if repairs(wanted, kernel.reference(wanted), kernel.read(wanted, {"route"})):
            msg = "routes differ that should not"
            raise Permanent(msg)

    note("compare floor", lambda: bare.dump(GETROUTE, _OWN_IPV4))
    note("compare", compared)
    note("compare peer", lambda: _ip_route(as_json=True))
    note("unchanged floor", lambda: bare.dump(GETROUTE, _OWN_IPV4))
    note("unchanged", lambda: kernel.fingerprint("route"))
    note("unchanged peer", lambda: _ip_route(as_json=False))


def _without_errors(errors: Mapping[str, Exception]) -> None:
    for error in errors.values():
        raise error


def _ip(lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)


def _ip_route(*, as_json: bool) -> None:
    format_ = ["-j"] if as_json else []
    subprocess.run(["ip", *format_, "route", "show", "table", str(_TABLE)], stdout=subprocess.DEVNULL, check=True)


def _add_by_pyroute2(library: IPRoute, items: Iterable[Route]) -> None:
    index = library.link_lookup(ifname=_LINK)[0]
    for item in items:
        library.route("add", dst=str(item.prefix), gateway=str(_NEIGHBOUR), oif=index, table=_TABLE, proto=OWN_PROTOCOL, flags=["onlink"])


def _dump_by_pyroute2(library: IPRoute, size: int) -> None:
    if sum(1 for _ in library.get_routes(socket.AF_INET, table=_TABLE)) != size:
        msg = "pyroute2 does not list what is there"
        raise Permanent(msg)


FIGURE = Figure("routes-in-bulk", "routes added, compared and looked at, beside the kernel's own time and `ip`", run, needs_root=True)
