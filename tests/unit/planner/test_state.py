"""The state's indexes after objects that change places."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.topology import Peering, PeeringEnd, Topology
from schemas.values import Address, Name, Prefix
from services.planner.state import State
from tests.topologies import cluster, gateway, node, peering, pod, two_clusters

FIRST, SECOND = Address("10.200.1.10"), Address("10.200.1.11")


def put_all(state: State, *items: Topology) -> None:
    for item in items:
        state.put(item)


def test_gateways_of_two_peerings_change_places() -> None:
    """Whichever peering is put first, each gateway serves the one that it is said to serve."""
    first = peering()
    far = PeeringEnd(cluster=Name("naples"), gateway=Name("gateway"), remap_pods=(Prefix("10.68.0.0/16"),))
    near = replace(first.ends[0], gateway=Name("second"))
    second = Peering(name=Name("rome-naples"), cluster=Name("rome"), ends=(near, far))
    state = State([*two_clusters(), cluster("naples"), gateway("naples"), gateway("rome", "second", 20), second])
    swapped = (replace(first, ends=(near, first.ends[1])), replace(second, ends=(first.ends[0], far)))
    put_all(state, *swapped)
    served = {name: attachment.peering.name for name, attachment in state.attachments["rome"].items()}
    assert served == {"second": "rome-milan", "gateway": "rome-naples"}
    state.remove(swapped[0].ref)
    assert list(state.attachments["rome"]) == ["gateway"]


def test_pods_change_addresses() -> None:
    """The addresses are taken by whom they belong to now, and free once that one is gone."""
    state = State([*two_clusters(), pod("a", "worker-1", FIRST), pod("b", "worker-1", SECOND)])
    put_all(state, pod("a", "worker-1", SECOND), pod("b", "worker-1", FIRST))
    assert (state.pod_with("rome", FIRST), state.pod_with("rome", SECOND)) == ("Endpoint/rome/b", "Endpoint/rome/a")
    state.remove("Endpoint/rome/b")
    assert state.pod_with("rome", FIRST) is None


def test_hosts_change_addresses() -> None:
    """The same of underlay addresses."""
    one, two = node("worker-1", 1), node("worker-2", 2)
    state = State([*two_clusters(), one, two])
    put_all(state, replace(one, addresses=two.addresses), replace(two, addresses=one.addresses))
    found = [state.host_with("rome", address) for address in (*one.addresses, *two.addresses)]
    assert [host.name for host in found if host is not None] == ["worker-2", "worker-1"]
