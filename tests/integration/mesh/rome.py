"""The cluster of examples/encryption.yaml in network namespaces: the lab's hosts and pods, and the cores of planner and appliers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.topology import PublicKey, Topology
from schemas.values import Name
from services.cli.files import load
from services.cli.lab import namespaces
from services.cli.lab.layout import UNDERLAY, Layout, host_namespace, layout
from services.cli.lab.wiring import Wiring
from services.kernel.curve25519 import new_private_key, public_key
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.meshes import Mesh
from tests.topologies import EXAMPLES, said


@contextlib.contextmanager
def encrypting_cluster(folder: Path) -> Iterator[Mesh[LinuxHost]]:
    """Three nodes, the first two encrypting; skips where a lab is up."""
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    wiring, keys = Wiring(), [new_private_key() for _ in range(3)]
    by_host = {HostId("rome", f"worker-{number}"): key for number, key in enumerate(keys, 1)}

    def make(host: HostId) -> LinuxHost:
        place: Path = folder / host.name
        place.mkdir()
        return LinuxHost(host_namespace(*host), place, by_host[host])

    mesh = Mesh(make)
    public: list[Topology] = [
        PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=public_key(key)) for host, key in by_host.items()
    ]
    items = load([EXAMPLES / "encryption.yaml"])
    try:
        wiring.make_underlay()
        wiring.turn_into(layout(items))
        mesh.hear(said(item, number) for number, item in enumerate([*items, *public], 1))
        yield mesh
    finally:
        for host in mesh.hosts.values():
            host.close()
        wiring.turn_into(Layout({}, {}))
        namespaces.remove([UNDERLAY])
