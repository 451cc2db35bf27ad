"""The planner and a mesh of appliers over kernels in memory: whatever the order of events, every kernel ends with the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.core import Said
from services.planner.state import HostId
from tests.histories import ANY_KEY, EVENTS, LAST_WORDS, PRIVATE_KEYS, ROME_WORKERS, orders
from tests.meshes import InMemory, Mesh
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY


def mesh_in_memory() -> Mesh[InMemory]:
    return Mesh(lambda host: InMemory(PRIVATE_KEYS.get(host, ANY_KEY)))


def held(mesh: Mesh[InMemory]) -> dict[HostId, tuple[dict[str, object], dict[str, str]]]:
    """What each kernel holds, and which plan its marker names."""
    kernels = {name: host.kernel for name, host in mesh.hosts.items()}
    return {
        name: (dict(kernel.objects), dict(kernel.marker.units) if kernel.marker else {})
        for name, kernel in kernels.items()
        if kernel.objects
    }


def as_it_was_said() -> Mesh[InMemory]:
    mesh = mesh_in_memory()
    mesh.hear(LAST_WORDS)
    return mesh


EXPECTED = held(as_it_was_said())


def test_what_is_expected_is_a_whole_mesh() -> None:
    """The comparison is not one of nothing: six hosts, with tunnels at both gateways, encryption between the nodes of rome, one of them
    with a pod that roams, a remap from a pool, published rules and routes, and an address that is mapped."""
    assert len(EXPECTED) == 6

    def having(*words: str) -> list[str]:
        """The hosts with an object that has all these words in its key or itself."""
        return [
            str(host)
            for host, (objects, _) in EXPECTED.items()
            if any(all(word in f"{key} {objects[key]}" for word in words) for key in objects)
        ]

    gateways, nodes = [str(ROME_GATEWAY), str(MILAN_GATEWAY)], [str(host) for host in ROME_WORKERS]
    for words, hosts in (
        (("link mt.2",), gateways),
        (("peer me.0",), nodes),
        (("peer me.0", "10.200.1.99/32"), nodes[:1]),
        ((" remote 10.9",), nodes),
        (("chain meshmark.fw.ssh", "'22'"), gateways[:1]),
        (("route ", "10.9.0.0/16", "mt.2"), gateways[:1]),
        ((" mapped 10.71.", "192.0.2.50"), gateways[1:]),
    ):
        assert sorted(having(*words)) == sorted(hosts), words


@pytest.mark.timeout(600)  # a minute of a processor's time, of which it may have to share
@settings(max_examples=1000)
@given(order=orders(rests=st.booleans()))
def test_any_order_leads_to_the_same_kernels(order: list[tuple[Said, bool]]) -> None:
    """Messages in any order, some of them twice and old ones late, with hosts that apply what is planned in between."""
    mesh = mesh_in_memory()
    mesh.hear_resting(order)
    assert held(mesh) == EXPECTED
    turns = mesh.turns
    mesh.hear(EVENTS)
    assert mesh.turns == turns, "all of it once more changes nothing"
