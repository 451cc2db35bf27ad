"""What 1,000 WireGuard peers cost, made from nothing, and with one of them changed.

Two devices stand in a network namespace: meshmark's driver writes to one what its plan says, and reads it back; ``wg syncconf`` is given
the same peers as a file for the other. Both take turns, so that they suffer alike from whatever else runs. A round makes all peers of an
empty device, changes the second AllowedIP of one, and takes all away again.

Peer: ``wg syncconf``. It changes a device to what a file says, and starts a program for that; so does whoever calls it.
"""

from __future__ import annotations

import base64
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from benchmarks.interval import interval
from benchmarks.result import Details, Figure, Result, median, result
from schemas.host_objects import WireguardLink, WireguardPeer
from schemas.values import Endpoint, Key, Prefix
from services.cli.render import object_lines
from services.kernel.linux import LinuxKernel
from services.kernel.namespace import enter_new_network
from services.kernel.port import Kernel
from services.kernel.transaction import Change
from services.runtime.errors import MeshmarkError

_PEERS = 1000
_ROUNDS = 10
_PORT = 51871
Times = Mapping[str, float]
"""Milliseconds by what was done."""


def run(say: Callable[[str], None]) -> list[Result]:
    with ThreadPoolExecutor(1, thread_name_prefix="peers") as thread, TemporaryDirectory() as folder:
        # The namespace is the thread's, and goes with it.
        return thread.submit(_measured, Path(folder), say).result()


def _measured(folder: Path, say: Callable[[str], None]) -> list[Result]:
    enter_new_network()
    kernel = LinuxKernel(folder)
    with devices(kernel) as (ours, theirs):
        say(f"two devices stand; {_ROUNDS} rounds of {_PEERS} peers each")
        found = [(_by_driver(kernel, ours), _by_program(theirs, folder)) for _ in range(_ROUNDS)]
    kernel.close()
    return [_summed_up(name, [(mine[name], other[name]) for mine, other in found]) for name in ("peers-1000", "peers-change-1-of-1000")]


def _summed_up(name: str, rounds: Sequence[tuple[float, float]]) -> Result:
    """Milliseconds of both in each round."""
    over = interval(rounds, lambda part: median(mine / other for mine, other in part))
    details: Details = {"time over that of wg syncconf, same round": {"median": over.value, "from": over.low, "to": over.high}}
    return result(name, [mine for mine, _ in rounds], "ms", peer=median(other for _, other in rounds), details=details)


@contextmanager
def devices(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """Two devices of names of their own: the sockets of wireguard-go are in one folder for all network namespaces."""
    links = [WireguardLink(f"mb.{os.getpid() % 46656:x}{number}", _PORT + number, 1420) for number in (0, 1)]
    try:
        for link in links:
            kernel.write(Change(None, link))
        yield links[0].name, links[1].name
    finally:
        for link in links:
            kernel.write(Change(link, None))


def peers(link: str, count: int) -> list[WireguardPeer]:
    """So many peers, each with two prefixes."""
    return [
        WireguardPeer(
            link,
            Key(base64.b64encode(number.to_bytes(32, "big")).decode()),
            Endpoint(f"198.18.{number // 256}.{number % 256}:51871"),
            (Prefix(f"10.{64 + number // 256}.{number % 256}.0/24"), Prefix(f"fd00:{number:x}::/64")),
        )
        for number in range(1, count + 1)
    ]


def changed(peer: WireguardPeer) -> WireguardPeer:
    """The peer with another second prefix."""
    return replace(peer, allowed_ips=(peer.allowed_ips[0], Prefix("fd01::/64")))


def _by_driver(kernel: Kernel, link: str) -> Times:
    wanted = peers(link, _PEERS)
    last = wanted[-1]
    made_ms = _timed(lambda: _written(kernel, [Change(None, item) for item in wanted]))
    changed_ms = _timed(lambda: _written(kernel, [Change(last, changed(last))]))
    _written(kernel, [Change(item, None) for item in wanted])
    return {"peers-1000": made_ms, "peers-change-1-of-1000": changed_ms}


def _written(kernel: Kernel, changes: list[Change]) -> None:
    for error in kernel.write_all(changes).values():
        raise error


def _by_program(link: str, folder: Path) -> Times:
    wanted = peers(link, _PEERS)
    first, second = _file(folder / "first", wanted), _file(folder / "second", [*wanted[:-1], changed(wanted[-1])])
    found = {"peers-1000": _timed(lambda: _synced(link, first)), "peers-change-1-of-1000": _timed(lambda: _synced(link, second))}
    _synced(link, _file(folder / "empty", []))
    return found


def _file(path: Path, wanted: list[WireguardPeer]) -> Path:
    head = ["[Interface]", f"ListenPort = {_PORT + 1}"]
    path.write_text("\n".join([*head, *(line for item in wanted for line in object_lines(item))]) + "\n", encoding="ascii")
    return path


def _synced(link: str, path: Path) -> None:
    done = subprocess.run(["wg", "syncconf", link, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"wg syncconf {link}: {done.stderr.strip()}"
        raise MeshmarkError(msg)


def _timed(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return (time.perf_counter() - started_s) * 1000


FIGURE = Figure("peers", f"{_PEERS} WireGuard peers from nothing, and one of them changed, beside wg syncconf", run, needs_root=True)
