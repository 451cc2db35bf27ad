"""Meshes in network namespaces without services: the lab's hosts and pods, and the cores of planner and appliers in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from schemas.topology import Gateway, Node, PublicKey, Topology
from schemas.values import Address, Name
from services.cli.lab import listing, namespaces, probe
from services.cli.lab.chosen import Chosen
from services.cli.lab.layout import PREFIX, UNDERLAY, Layout, host_namespace, layout
from services.cli.lab.probe import Probe
from services.cli.lab.wiring import Wiring
from services.kernel.curve25519 import new_private_key, public_key
from services.planner.core import Said
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.meshes import Mesh
from tests.topologies import said

WAIT_S = 120.0
"""Packets flow within this time after a change, also in an emulated machine on a busy one."""


class Site:
    """A mesh as it is now. Hosts and pods are called as in the lab's namespaces: ``milan.worker-1``, ``turin.pod.bank``, ``underlay``.

    Hosts of the kinds `keyed` have a key from the start, as if their appliers had published it before they heard of a plan. `outside` are
    addresses of the underlay's router, for an outsider that knows no cluster.
    """

    def __init__(self, folder: Path, objects: Iterable[Topology], keyed: type[Topology], outside: Iterable[Address]) -> None:
        self._objects: dict[str, Topology] = {}
        self._first = tuple(objects)
        self._keyed = keyed
        self._outside = tuple(outside)
        self._private_keys: dict[HostId, bytes] = {}
        self._folder = folder
        self._wiring = Wiring()
        self._sequence = 0
        self._made = 0
        self.mesh = Mesh(self._host)

    @property
    def topology(self) -> list[Topology]:
        return list(self._objects.values())

    @property
    def chosen(self) -> Chosen:
        """The numbers and external addresses that the planner chose."""
        allocations, chosen = self.mesh.core.allocations, Chosen()
        chosen.numbers.update({(host.cluster, host.name): value.number for host, value in allocations.numbers.items()})
        chosen.externals.update({mapping: value.address for mapping, value in allocations.externals.items()})
        return chosen

    def object(self, ref: str) -> Topology:
        return self._objects[ref]

    def host(self, cluster: str, name: str) -> LinuxHost:
        return self.mesh.hosts[HostId(cluster, name)]

    def make(self) -> None:
        """Wire the hosts, and bring them to the first plans, to the end of all rollouts."""
        self._wiring.make_underlay()
        self._wiring.turn_into(layout(self._first))
        namespaces.script([f"address add {address.host_prefix} dev br0" for address in self._outside], UNDERLAY)
        self.say(self._first)

    def say(self, items: Iterable[Topology]) -> None:
        """Say that these objects are so; hosts and pods among them are there, and hold what follows, when this returns."""
        found = list(items)
        found += [self._key(item) for item in found if isinstance(item, self._keyed) and isinstance(item, Node | Gateway)]
        self._objects |= {item.ref: item for item in found}
        self._wire()
        self.mesh.hear([said(item, self._next()) for item in found])
        waiting = {ref for ref in self._objects if ref not in self.mesh.core.state.objects}
        assert not waiting, f"not admitted: {waiting}"

    def forget(self, *refs: str) -> None:
        """Say that these objects are no more, and the keys of hosts among them; those are gone when this returns, and may come back."""
        items = [self._objects.pop(ref) for ref in refs]
        hosts = [HostId(item.cluster, item.name) for item in items if isinstance(item, Node | Gateway)]
        items += [self._objects.pop(ref) for host in hosts if (ref := f"PublicKey/{host.cluster}/{host.name}") in self._objects]
        self.mesh.hear([Said((item.kind.lower(), item.home, item.name), b"", self._next()) for item in items])
        left = {item.ref for item in items} & self.mesh.core.state.objects.keys()
        assert not left, f"still there: {left}"
        for host in hosts:
            if host in self.mesh.hosts:
                self.mesh.hosts.pop(host).close()
        self._wire()

    def again(self, cluster: str, name: str, *, restart: bool = False) -> None:
        """A host applies the plan that it has once more; with `restart`, an applier that knows nothing yet does."""
        host, plan = self.host(cluster, name), self.mesh.core.published[HostId(cluster, name)]
        if restart:
            host.restart()
        report = host.apply(plan, self.mesh.turns)
        assert report.outcome == "applied", report

    def lose_key(self, cluster: str, name: str) -> None:
        """A host that is gone comes back with another key."""
        del self._private_keys[HostId(cluster, name)]

    def close(self) -> None:
        """Remove what was made, whatever failed."""
        try:
            for host in self.mesh.hosts.values():
                host.close()
        finally:
            self._wiring.turn_into(Layout({}, {}))
            namespaces.remove([UNDERLAY])

    async def carries(self, wanted: Callable[[Probe], bool]) -> list[Probe]:
        """Make the probes that are wanted until all of them pass; these."""
        probes = [each for each in probe.wanted(self.topology, self.chosen) if wanted(each)]
        end = time.monotonic() + WAIT_S
        while failed := [check for check in await probe.run(probes) if not check.ok]:
            if time.monotonic() > end:
                pytest.fail("\n".join(f"{check.name}: {check.detail}" for check in failed))
            await asyncio.sleep(0.1)
        return probes

    def run(self, place: str, *argv: str) -> str:
        """What a command prints in this namespace."""
        return listing.run(f"{PREFIX}{place}", *argv)

    def differences(self) -> dict[HostId, Sequence[object]]:
        """Where kernels are not what their plans say."""
        found = {name: host.differences(self.mesh.core.published[name]) for name, host in self.mesh.hosts.items()}
        return {name: differences for name, differences in found.items() if differences}

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _wire(self) -> None:
        wanted = layout(self.topology)
        if wanted != self._wiring.made:
            self._wiring.turn_into(wanted)

    def _key(self, item: Node | Gateway) -> PublicKey:
        private = self._private_keys.setdefault(HostId(item.cluster, item.name), new_private_key())
        return PublicKey(name=Name(item.name), cluster=item.cluster, key=public_key(private))

    def _host(self, name: HostId) -> LinuxHost:
        self._made += 1
        folder = self._folder / f"{self._made}.{name.cluster}.{name.name}"
        folder.mkdir()
        return LinuxHost(host_namespace(name.cluster, name.name), folder, self._private_keys.get(name, b""))
