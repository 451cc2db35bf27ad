"""The planner and a mesh of appliers over kernels in memory: whatever the order of events, every kernel ends with the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.core import Said
from services.planner.state import HostId
from tests.histories import ANY_KEY, EVENTS, LAST_WORDS, PRIVATE_KEYS, orders
from tests.meshes import InMemory, Mesh


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
    """The comparison is not one of nothing: six hosts, with tunnels that carry traffic at both gateways."""
    assert len(EXPECTED) == 6
    assert all(any(key.startswith("link mt.2") for key in EXPECTED[host][0]) for host in PRIVATE_KEYS)


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
