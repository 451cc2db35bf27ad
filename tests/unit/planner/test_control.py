"""Control addresses: what is planned where a cluster names them, and where they cannot be."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.firewall import FirewallChain, FirewallConfiguration
from schemas.host_objects import MAIN_TABLE, NftChain, NftElement, PolicyRule
from schemas.topology import Cluster, Topology
from schemas.values import Name, Prefix
from services.planner.core import Core
from services.planner.state import HostId
from tests.topologies import ROME_GATEWAY, cluster, gateway, peering, settled_plans, tell, two_clusters

CONTROL = (Prefix("192.0.2.7/32"), Prefix("2001:db8:9::/64"))
TABLE = "meshmark.rome.rome-milan"


def controlled(*control: Prefix, **changes: object) -> Cluster:
    return cluster("rome", control=control or CONTROL, **changes)


def test_published_chains_let_a_host_and_its_broker_speak() -> None:
    """Whatever a published firewall drops, what a host says to its broker and hears from it comes first; forwarding does not."""
    hooks = ("prerouting", "input", "forward", "output", "postrouting")
    chains = tuple(FirewallChain(name=f"on_{hook}", hook=hook, priority=index, policy="drop") for index, hook in enumerate(hooks))
    walls = FirewallConfiguration(name=Name("walls"), cluster=Name("rome"), chains=chains)
    plan = settled_plans([controlled(), *two_clusters()[1:], walls])[ROME_GATEWAY]
    objects = [entry.object for entry in plan.units["firewall/rome/walls"].values()]
    found = {item.name: item.rules for item in objects if isinstance(item, NftChain)}
    assert found["on_forward"] == ()
    for hook in ("prerouting", "input"):
        assert [[one.selector for one in rule[:-1]] for rule in found[f"on_{hook}"]] == [
            ["fib daddr type", "ip saddr"],
            ["fib daddr type", "ip6 saddr"],
        ]
    for hook in ("output", "postrouting"):
        assert [rule[1].values for rule in found[f"on_{hook}"]] == [("192.0.2.7",), ("2001:db8:9::/64",)]
        assert {rule[-1].verdict for rule in found[f"on_{hook}"]} == {"accept"}
    plain = settled_plans([*two_clusters(), walls])[ROME_GATEWAY].units["firewall/rome/walls"]
    assert all(entry.object.rules == () for entry in plain.values() if isinstance(entry.object, NftChain))


def test_what_a_host_sends_to_its_broker_is_let_by_first() -> None:
    """On gateways it has a rule before all others, and a return before what drops or translates; on nodes a return."""
    plans = settled_plans([controlled(), *two_clusters()[1:]])
    worker = HostId("rome", "worker-1")
    for host, chain in ((ROME_GATEWAY, "leave"), (ROME_GATEWAY, "senders"), (worker, "closed"), (worker, "senders")):
        objects = plans[host].objects()
        assert NftElement(TABLE, "control", "192.0.2.7") in objects.values()
        assert NftElement(TABLE, "control6", "2001:db8:9::/64") in objects.values()
        first, second = [rule for item in objects.values() if isinstance(item, NftChain) and item.name == chain for rule in item.rules[:2]]
        assert all(rule[-1].verdict == "return" for rule in (first, second))
        assert [rule[1].values for rule in (first, second)] == [("@control",), ("@control6",)]
    rules = [item for item in plans[ROME_GATEWAY].objects().values() if isinstance(item, PolicyRule)]
    own = [item for item in rules if item.table == MAIN_TABLE]
    assert {item.to for item in own} == set(CONTROL)
    assert all(item.iif == "lo" for item in own)
    assert max(item.priority for item in own) < min(item.priority for item in rules if item not in own)


def test_nothing_else_changes_by_it() -> None:
    """A cluster that names none, and the far cluster of one that does, are planned as before."""
    before, after = settled_plans(two_clusters()), settled_plans([controlled(), *two_clusters()[1:]])
    for host, plan in before.items():
        changed = {key for key, item in after[host].objects().items() if plan.objects().get(key) != item}
        assert bool(changed) == (host.cluster == "rome")
        assert all("control" in key or key.endswith((" leave", " closed", " senders")) or key.split()[0] == "rule" for key in changed), (
            changed
        )


HELD = {
    "far pods as they are seen": ("10.61.0.9/32", "10.61.0.0/16"),
    "far pods as they are": ("10.210.0.9/32", "10.210.0.0/16"),
    "far external prefix": ("10.62.0.0/24", "10.62.0.0/16"),
    "a larger prefix": ("10.60.0.0/14", "10.61.0.0/16"),
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("case", HELD)
def test_no_remote_prefix_holds_a_control_address(case: str, order: int) -> None:
    """Whether the cluster names it before the peering is there or after, who comes last is refused, and both are named."""
    control, prefix = HELD[case]
    milan = cluster("milan", pod_prefixes=(Prefix("10.210.0.0/16"),))
    base: list[Topology] = [cluster("rome"), milan, gateway("rome"), gateway("milan")]
    core = Core()
    assert tell(core, base).refused == []
    first, second = [controlled(Prefix(control)), peering()][::order]
    assert tell(core, [first], first=50).refused == []
    (refusal,) = tell(core, [second], first=60).refused
    assert refusal.other == first.ref
    assert f"{prefix} of Peering/rome/rome-milan overlaps the control prefix {control} of Cluster/rome/rome" in refusal.reason


@pytest.mark.parametrize("control", ["10.200.9.9/32", "10.70.0.0/24", "10.80.0.7/32", "10.0.0.0/8"])
def test_no_prefix_of_the_cluster_itself_does(control: str) -> None:
    """What is for pods goes through overlay and tunnels or nowhere: a broker with such an address could not be promised anything."""
    (refusal,) = tell(Core(), [controlled(Prefix(control))]).refused
    assert refusal.field == "$.control[0]"
    assert f"{control} overlaps" in refusal.reason


def test_pools_go_around_it() -> None:
    """A control address inside a pool keeps its prefix from being given out."""
    narrow = controlled(Prefix("10.96.7.7/32"), pools=(Prefix("10.96.0.0/15"),))
    (rome, milan), core = peering().ends, Core()
    bare = peering(ends=(replace(rome, remap_pods=()), milan))
    tell(core, [narrow, *[item for item in two_clusters()[1:] if item.kind != "Peering"], bare])
    assert core.allocations.remaps[Name("rome"), Name("rome-milan")].seen("rome", Prefix("10.200.0.0/16")) == "10.97.0.0/16"
