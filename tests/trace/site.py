"""The cluster of examples/encryption.yaml in network namespaces: its hosts and pods, which may be changed while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from schemas.plan import HostPlan
from schemas.topology import Cluster, Node, PublicKey, Topology
from schemas.values import Address, Family, Name
from services.cli.files import load
from services.cli.lab import namespaces
from services.cli.lab.layout import UNDERLAY, Layout, host_namespace, layout
from services.cli.lab.wiring import Wiring
from services.cli.trace.ends import Session, session
from services.kernel.curve25519 import new_private_key, public_key
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.meshes import Mesh
from tests.topologies import EXAMPLES, said
from tests.tracing import ONE, THREE, TWO

_THIRD_BY_IPV6 = Address("2001:db8:18::13")
"""The example's third node has IPv4 alone; an overlay over IPv6 finds it there."""
GRACE_S, QUIET_S = 0.5, 1.5
"""What the audit waits in tests: nothing changes but what they change."""


class Rome:
    """The cluster, up from `make` to `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wiring = Wiring()
        self._keys = {host: new_private_key() for host in (ONE, TWO, THREE)}
        self._items = load([EXAMPLES / "encryption.yaml"])
        self._sequence = 0
        self._outer: Family | None = None
        self.mesh = Mesh(self._host)

    @property
    def hosts(self) -> dict[HostId, LinuxHost]:
        return self.mesh.hosts

    def plan(self, host: HostId) -> HostPlan:
        return self.mesh.core.published[host]

    def make(self) -> None:
        """Wire the hosts and bring them to their plans."""
        keys: list[Topology] = [
            PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=public_key(key)) for host, key in self._keys.items()
        ]
        self._wiring.make_underlay()
        self._wiring.turn_into(layout(self._items))
        self._hear([*self._items, *keys])

    def turn(self, outer: Family | None = None, **changes: object) -> None:
        """Let the cluster be that of the example but for these fields, live; with `outer`, nodes have addresses of this family alone."""
        (cluster,) = [item for item in self._items if isinstance(item, Cluster)]
        nodes = [item if outer is None else _with_one(item, outer) for item in self._items if isinstance(item, Node)]
        changed = [item for item in nodes if self.mesh.core.state.nodes["rome"][item.name] != item]
        self._hear([*changed, replace(cluster, **changes)])
        if outer != self._outer:
            self._outer = outer
            self._meet_anew()

    def session(self, source: str, destination: str, seconds: int = 60, services: Iterable[Address] = ()) -> Session:
        """The flow between two pods or nodes."""
        core = self.mesh.core
        return session(core.state, core.allocations, (f"rome/{source}", f"rome/{destination}"), None, seconds, services=services)

    def forget_traces(self) -> None:
        """End all that was asked for: with the applier that asked, the kernel's table goes."""
        for host in self.hosts.values():
            host.restart()

    def close(self) -> None:
        """Remove what was made, whatever failed."""
        try:
            for host in self.mesh.hosts.values():
                host.close()
        finally:
            self._wiring.turn_into(Layout({}, {}))
            namespaces.remove([UNDERLAY])

    def _meet_anew(self) -> None:
        """Have peers forget where they heard each other: one that moved first hears the other from where that was, and follows it back."""
        for host in (ONE, TWO):
            self.hosts[host].run("sh", "-ec", "for peer in $(wg show me.0 peers); do wg set me.0 peer $peer remove; done")
        for host in (ONE, TWO):
            self.hosts[host].repair(self.plan(host), self.mesh.turns)

    def _hear(self, items: list[Topology]) -> None:
        events = []
        for item in items:
            self._sequence += 1
            events.append(said(item, self._sequence))
        self.mesh.hear(events)

    def _host(self, host: HostId) -> LinuxHost:
        folder = self._folder / host.name
        folder.mkdir()
        return LinuxHost(host_namespace(*host), folder, self._keys[host])


def _with_one(item: Node, family: Family) -> Node:
    found = tuple(address for address in item.addresses if address.family == family)
    return replace(item, addresses=found or (_THIRD_BY_IPV6,))
