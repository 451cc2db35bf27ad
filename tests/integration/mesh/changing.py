"""The cluster of examples/encryption.yaml in network namespaces: its hosts and pods, whose cluster may be changed while it runs."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from schemas.plan import HostPlan
from schemas.topology import Cluster, PublicKey, Topology
from schemas.values import Name
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


class Rome:
    """The cluster, up from `make` to `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wiring = Wiring()
        self._keys = {host: new_private_key() for host in (ONE, TWO, THREE)}
        self._items = load([EXAMPLES / "encryption.yaml"])
        self._sequence = 0
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

    def turn(self, **changes: object) -> None:
        """Let the cluster be that of the example but for these fields, live."""
        (cluster,) = [item for item in self._items if isinstance(item, Cluster)]
        self._hear([replace(cluster, **changes)])

    def session(self, source: str, destination: str, seconds: int = 60) -> Session:
        """The flow between two pods."""
        core = self.mesh.core
        return session(core.state, core.allocations, (f"rome/{source}", f"rome/{destination}"), None, seconds)

    def close(self) -> None:
        """Remove what was made, whatever failed."""
        try:
            for host in self.mesh.hosts.values():
                host.close()
        finally:
            self._wiring.turn_into(Layout({}, {}))
            namespaces.remove([UNDERLAY])

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
