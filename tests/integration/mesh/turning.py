"""Clusters in network namespaces of which a host changes its key: the planner's core, and real hosts that follow it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from schemas.topology import PublicKey, Topology
from schemas.values import Address, Name
from services.cli.lab import namespaces
from services.cli.lab.layout import UNDERLAY, Layout, host_namespace, layout
from services.cli.lab.wiring import Wiring
from services.kernel.curve25519 import new_private_key, public_key
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.talks import PATIENCE_S
from tests.turnovers import Turnovers


@contextlib.contextmanager
def up(
    items: Sequence[Topology], keyed: Collection[HostId], folder: Path, outside: Iterable[Address] = ()
) -> Iterator[Turnovers[LinuxHost]]:
    """These objects as a mesh, while the body runs; the hosts `keyed` have said their keys. `outside` are the underlay's addresses."""
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    wiring, private = Wiring(), {host: new_private_key() for host in keyed}

    def make(host: HostId) -> LinuxHost:
        place = folder / f"{host.cluster}.{host.name}"
        place.mkdir()
        return LinuxHost(host_namespace(*host), place, private.get(host, b""))

    turnovers = Turnovers(make)
    public: list[Topology] = [PublicKey(name=Name(at.name), cluster=Name(at.cluster), key=public_key(key)) for at, key in private.items()]
    try:
        wiring.make_underlay()
        wiring.turn_into(layout(items))
        namespaces.script([f"address add {address.host_prefix} dev br0" for address in outside], UNDERLAY)
        turnovers.hear([*items, *public])
        while turnovers.round():
            pass
        yield turnovers
    finally:
        for host in turnovers.hosts.values():
            host.close()
        wiring.turn_into(Layout({}, {}))
        namespaces.remove([UNDERLAY])


async def turn_over(made: Turnovers[LinuxHost], turning: HostId, stages: Sequence[str], after: Callable[[], None] = lambda: None) -> None:
    """Let a host change its key, by these stages to the end; `after` is called each time that the hosts hold the plans of another one."""
    old, allocations = made.core.state.keys[turning].key, made.core.allocations
    made.rotate(turning)  # asked again, it is the same
    async with asyncio.timeout(PATIENCE_S):
        while made.stage(turning) != "done":
            before = allocations.rotations.get(turning)
            was_new = await asyncio.to_thread(made.round)
            now = allocations.rotations[turning]
            if before is None or (before.stage, before.tunnel) != (now.stage, now.tunnel):
                after()
            if not was_new:
                await asyncio.sleep(0.1)
    assert made.stages == list(stages)
    new = made.core.state.keys[turning].key
    assert new != old
    assert made.hosts[turning].ask(lambda kernel, _: kernel.keys().all) == (new,)
    for name in made.hosts.keys() - made.away:
        host = made.hosts[name]
        assert not {"me.1", "mt.beside"} & {line.split(": ")[1] for line in host.run("ip", "-o", "link").splitlines()}
        assert not host.differences(made.plans[name])
