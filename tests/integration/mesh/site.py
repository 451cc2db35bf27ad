"""Three clusters in a row in network namespaces: the lab's hosts and pods, and the cores of planner and appliers in this process.

They are those of examples/three-clusters.yaml, rome ══ milan ══ turin, with IPv4 and IPv6 in all pods. Hosts of milan have both families,
those of rome and turin IPv6 alone: so overlay links go over either, and tunnels over IPv6.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.topology import Cluster, Gateway, IpMapping, Node, Pod, PublicKey, Topology
from schemas.values import IPV4, IPV6, Address, Family, Name
from services.cli.files import load
from services.cli.lab import listing, namespaces, probe
from services.cli.lab.chosen import Chosen
from services.cli.lab.expected import Between, joined
from services.cli.lab.layout import PREFIX, UNDERLAY, Layout, host_namespace, layout
from services.cli.lab.probe import Probe
from services.cli.lab.wiring import Wiring
from services.kernel.curve25519 import new_private_key, public_key
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.meshes import Mesh
from tests.topologies import EXAMPLES, said

WAIT_S = 120.0
"""Packets flow within this time after a change, also in an emulated machine on a busy one."""
OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
"""Addresses of the underlay's router, for an outsider that knows no cluster."""
AWARE = {IPV4: Address("192.0.2.51"), IPV6: Address("2001:db8:99::51")}
"""The same for one that knows how milan calls others, and that milan's second node leads there."""
_MILAN, _LEADER = Name("milan"), Name("worker-2")
_MORE = (
    # The example maps this pod of milan by IPv4 alone.
    IpMapping(name=Name("mint-6"), cluster=_MILAN, real=Address("fd00:200:0:2::10"), external=Address("fd00:71:0:200::20")),
    *(
        IpMapping(name=Name(f"outside-{item.family}"), cluster=_MILAN, real=item, node=_LEADER, masquerade=True)
        for item in OUTSIDE.values()
    ),
    *(IpMapping(name=Name(f"aware-{item.family}"), cluster=_MILAN, real=item, node=_LEADER) for item in AWARE.values()),
)


class Site:
    """The mesh as it is now. Hosts and pods are called as in the lab's namespaces: ``milan.worker-1``, ``turin.pod.bank``, ``underlay``."""

    def __init__(self, folder: Path) -> None:
        found = [_placed(item) for item in load([EXAMPLES / "three-clusters.yaml"])]
        gateways = [item for item in found if isinstance(item, Gateway)]
        self._keys = {HostId(item.cluster, item.name): new_private_key() for item in gateways}
        # Known from the start: appliers publish theirs before they hear of a plan.
        keys = [PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=public_key(key)) for host, key in self._keys.items()]
        self._objects: dict[str, Topology] = {item.ref: item for item in [*found, *_MORE, *keys]}
        self._folder = folder
        self._wiring = Wiring()
        self._sequence = 0
        self._mesh = Mesh(self._host)

    @property
    def topology(self) -> list[Topology]:
        return list(self._objects.values())

    @property
    def chosen(self) -> Chosen:
        """The numbers and external addresses that the planner chose."""
        allocations, chosen = self._mesh.core.allocations, Chosen()
        chosen.numbers.update({(host.cluster, host.name): value.number for host, value in allocations.numbers.items()})
        chosen.externals.update({mapping: value.address for mapping, value in allocations.externals.items()})
        return chosen

    def object(self, ref: str) -> Topology:
        return self._objects[ref]

    def make(self) -> None:
        """Wire the hosts, and bring them to the first plans, with all tunnels."""
        self._wiring.make_underlay()
        self._wiring.turn_into(layout(self.topology))
        namespaces.script([f"address add {address.host_prefix} dev br0" for address in (*OUTSIDE.values(), *AWARE.values())], UNDERLAY)
        self._say(self.topology)

    def turn_to(self, overlay: str, sources: str) -> None:
        """Let all clusters have this overlay and this mode of sources, live."""
        self._say([replace(item, overlay=overlay, sources=sources) for item in self.topology if isinstance(item, Cluster)])

    def close(self) -> None:
        """Remove what was made, whatever failed."""
        try:
            for host in self._mesh.hosts.values():
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

    def external(self, mapping: str, family: Family) -> Address:
        """What rome dials for an address that milan maps."""
        item = self.object(f"IpMapping/milan/{mapping}")
        assert isinstance(item, IpMapping)
        found = self.chosen.external(item)
        assert found is not None
        return self.between("rome", "milan", family).dial(found)

    def address(self, ref: str, family: Family) -> Address:
        """The address of a node or pod."""
        item = self.object(ref)
        assert isinstance(item, Node | Pod)
        return next(address for address in item.addresses if address.family == family)

    def between(self, here: str, there: str, family: Family) -> Between:
        """The peering of two clusters."""
        found = joined(self.topology, here, there, family)
        assert found is not None
        return found

    def run(self, place: str, *argv: str) -> str:
        """What a command prints in this namespace."""
        return listing.run(f"{PREFIX}{place}", *argv)

    def differences(self) -> dict[HostId, Sequence[object]]:
        """Where kernels are not what their plans say."""
        found = {name: host.differences(self._mesh.core.published[name]) for name, host in self._mesh.hosts.items()}
        return {name: differences for name, differences in found.items() if differences}

    def _say(self, items: Iterable[Topology]) -> None:
        events = []
        for item in items:
            self._sequence += 1
            self._objects[item.ref] = item
            events.append(said(item, self._sequence))
        self._mesh.hear(events)
        waiting = {ref for ref in self._objects if ref not in self._mesh.core.state.objects}
        assert not waiting, f"not admitted: {waiting}"

    def _host(self, name: HostId) -> LinuxHost:
        folder = self._folder / f"{name.cluster}.{name.name}"
        folder.mkdir()
        return LinuxHost(host_namespace(name.cluster, name.name), folder, self._keys.get(name, b""))


def _placed(item: Topology) -> Topology:
    """The object; a host outside milan without its IPv4 address."""
    if isinstance(item, Node | Gateway) and item.cluster != "milan":
        return replace(item, addresses=tuple(address for address in item.addresses if address.family == IPV6))
    return item
