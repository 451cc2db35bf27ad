"""Remaps from pools: which prefixes are given out, to whom they stay, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from schemas.codec import encode
from schemas.host_objects import NftElement
from schemas.status import Refusal
from schemas.topology import Cluster, Peering, PeeringEnd, Topology
from schemas.values import Address, Name, Prefix
from services.planner.compile import compile_all
from services.planner.core import Core, Said
from services.planner.remaps import first_free
from services.planner.state import Attachment, State, seen_prefixes
from tests.topologies import ROME_GATEWAY, cluster, gateway, node, peering, settled_plans, tell, two_clusters

POOL = Prefix("10.96.0.0/12")


def pooled(name: str, *pools: str, **changes: object) -> Cluster:
    return cluster(name, pools=tuple(map(Prefix, pools or (POOL,))), **changes)


def bare() -> Peering:
    """The peering of rome and milan without a remap at either end."""
    ends = tuple(replace(end, remap_pods=(), remap_external=()) for end in peering().ends)
    return peering(ends=ends)


def joined() -> list[Topology]:
    """Rome and Milan, whose pods overlap, each with a pool, and a peering that gives no remap."""
    items = [item for item in two_clusters() if not isinstance(item, Cluster | Peering)]
    return [pooled("rome"), pooled("milan"), *items, bare()]


def remaps(core: Core) -> dict[str, list[tuple[str, str]]]:
    """How each end that is not gone sees the other: by cluster, seen and real."""
    found: dict[str, list[tuple[str, str]]] = {}
    for item in core.state.peerings.values():
        for place, end in enumerate(item.ends):
            found[f"{item.name} in {end.cluster}"] = seen_prefixes(core.state, Attachment(item, place))
    return found


def delete(core: Core, ref: str, sequence: int) -> list[Refusal]:
    kind, home, name = ref.split("/")
    return core.hear([Said((kind.lower(), home, name), b"", sequence)]).refused


def restarted(core: Core) -> Core:
    """A planner that reads what the first one wrote: allocations and admitted objects, in the order of a store that was written often."""
    second = Core()
    for what, home, name in sorted(core.allocations.take_changes()):
        value = core.allocations.value(what, home, name)
        if value is not None:
            second.allocations.restore(what, home, name, encode(value))
    second.restore([(item, core.sequences[ref]) for ref, item in reversed(core.state.objects.items())], core.published, {})
    return second


def overlaps(core: Core) -> list[tuple[str, str]]:
    """Prefixes in use in one cluster that overlap, reserved ones only where a remap is concerned."""
    found = []
    for item in core.state.clusters.values():
        own = [*item.pod_prefixes, *item.external_prefixes, *item.internal_prefixes]
        seen = [seen for attachment in core.state.attachments[item.name].values() for seen, _ in seen_prefixes(core.state, attachment)]
        underlay = [address.host_prefix for host in core.state.hosts_of(item.name) for address in core.state.host(host).addresses]
        found += [pair for pair in itertools.combinations([*own, *seen], 2) if pair[0].overlaps(pair[1])]
        found += [(one, other) for one in seen for other in (*item.reserved, *underlay) if one.overlaps(other)]
    return found


def test_a_far_prefix_that_overlaps_is_remapped_from_the_pool() -> None:
    """Pods overlap and get a prefix of the same length from each end's pool; external prefixes do not, and are used as they are."""
    core = Core()
    assert tell(core, joined()).refused == []
    for home, external in (("rome", "10.71.0.0/16"), ("milan", "10.70.0.0/16")):
        (pods, real), outside = remaps(core)[f"rome-milan in {home}"]
        assert (real, pods.length, POOL.contains(pods)) == ("10.200.0.0/16", 16, True)
        assert outside == (external, external)
    assert overlaps(core) == []


def test_what_is_allocated_is_what_is_planned() -> None:
    """The gateway translates by the allocated remap, and nodes route it: as if the end had given it."""
    core = Core()
    tell(core, joined())
    (seen, _), _ = remaps(core)["rome-milan in rome"]
    (theirs, _), _ = remaps(core)["rome-milan in milan"]
    ends = bare().ends
    spelled = [
        replace(ends[0], remap_pods=(seen,)),
        replace(ends[1], remap_pods=(theirs,)),
    ]
    assert settled_plans(joined()) == settled_plans([*joined()[:-1], peering(ends=tuple(spelled))])
    plans = compile_all(core.state, core.allocations)
    assert NftElement("meshmark.rome.rome-milan", "to_real", seen.bare, "10.200.0.0/16") in plans[ROME_GATEWAY].objects().values()


def test_both_families_have_pools_of_their_own() -> None:
    """An IPv6 prefix is remapped from an IPv6 pool of any size, host parts kept."""
    pods = (Prefix("10.200.0.0/16"), Prefix("fd00:200::/48"))
    internal = {"rome": (Prefix("10.80.0.0/16"), Prefix("fd00:80::/64")), "milan": (Prefix("10.81.0.0/16"), Prefix("fd00:81::/64"))}
    clusters = [pooled(name, "10.96.0.0/12", "fd40::/10", pod_prefixes=pods, internal_prefixes=internal[name]) for name in internal]
    core = Core()
    assert tell(core, [*clusters, *joined()[2:]]).refused == []
    (four, _), (six, real), _ = remaps(core)["rome-milan in rome"]
    assert (POOL.contains(four), six.length, Prefix("fd40::/10").contains(six)) == (True, 48, True)
    assert real.translate(Address("fd00:200::7"), six) == six.address(7)


# Pools and reservations ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pools,field,words",
    [
        (("10.64.0.0/10", "10.80.0.0/16"), "$.pools[1]", "10.80.0.0/16 overlaps 10.64.0.0/10 ($.pools[0])"),
        (("10.80.0.0/16", "10.64.0.0/10"), "$.pools[1]", "10.64.0.0/10 overlaps 10.80.0.0/16 ($.pools[0])"),
        (("10.100.0.0/16", "10.96.0.0/12"), "$.pools[1]", "10.96.0.0/12 overlaps 10.100.0.0/16 ($.pools[0])"),
        (("fd40::/10", "fd40:7::/48"), "$.pools[1]", "fd40:7::/48 overlaps fd40::/10 ($.pools[0])"),
        (("10.96.0.0/12", "10.96.0.0/12"), "$.pools[1]", "10.96.0.0/12 overlaps 10.96.0.0/12 ($.pools[0])"),
        (("10.200.128.0/17",), "$.pools[0]", "10.200.128.0/17 overlaps 10.200.0.0/16 ($.podPrefixes[0])"),
        (("10.5.9.0/24",), "$.pools[0]", "10.5.9.0/24 overlaps 10.5.0.0/16 ($.internalPrefixes[0])"),
        (("169.254.128.0/17",), "$.pools[0]", "169.254.128.0/17 overlaps 169.254.0.0/16, which no cluster may use"),
    ],
)
def test_pools_that_overlap_are_refused_with_both_named(pools: tuple[str, ...], field: str, words: str) -> None:
    """A prefix in two pools would be given out twice, one that is the cluster's own would be nobody's."""
    own = cluster("rome", external_prefixes=(), internal_prefixes=(Prefix("10.5.0.0/16"),), pools=tuple(map(Prefix, pools)))
    (refusal,) = tell(Core(), [own]).refused
    assert (refusal.field, words in refusal.reason) == (field, True)


def site(*reserved: str) -> Cluster:
    """Milan, with one pool, and with what the site and its pods hold."""
    return cluster(
        "milan",
        pod_prefixes=(Prefix("10.9.0.0/16"),),
        external_prefixes=(),
        internal_prefixes=(Prefix("10.8.0.0/16"),),
        pools=(Prefix("10.64.0.0/10"),),
        reserved=tuple(map(Prefix, reserved)),
    )


def outside(name: str, external: str, number: int) -> list[Topology]:
    """Another cluster with an external prefix, joined with milan by gateways of their own."""
    home = cluster(
        name,
        pod_prefixes=(Prefix(f"10.{20 + number}.0.0/16"),),
        external_prefixes=(Prefix(external),),
        internal_prefixes=(Prefix(f"10.{30 + number}.0.0/16"),),
        pools=(Prefix("10.144.0.0/12"),),
    )
    first = PeeringEnd(cluster=Name("milan"), gateway=Name(f"gateway-{name}"))
    second = PeeringEnd(cluster=Name(name), gateway=Name("gateway"))
    joint = Peering(name=Name(f"milan-{name}"), cluster=Name("milan"), ends=(first, second))
    own, far = Address(f"172.18.1.{30 + number}"), Address(f"172.18.2.{30 + number}")
    return [home, gateway("milan", f"gateway-{name}", address=own), gateway(name, address=far), joint]


def exclusive(name: str, prefix: str, number: int) -> list[Topology]:
    """The same, with a remap of the external prefix that is given."""
    *others, joint = outside(name, f"10.{50 + number}.0.0/16", number)
    assert isinstance(joint, Peering)
    first, second = joint.ends
    return [*others, replace(joint, ends=(replace(first, remap_external=(Prefix(prefix),)), second))]


def test_shared_reservations_protect_what_they_hold_until_the_last_is_gone() -> None:
    """Holders may overlap; a remap goes around all of them; what two hold is free when both have gone; repetition changes nothing."""
    core = Core()
    held = site("10.64.0.0/12", "10.65.0.0/16")
    assert tell(core, [held, *outside("rome", "10.66.0.0/16", 0)]).refused == []
    _, (seen, real) = remaps(core)["milan-rome in milan"]
    assert (real, seen.length, Prefix("10.64.0.0/10").contains(seen)) == ("10.66.0.0/16", 16, True)
    assert not seen.overlaps(Prefix("10.64.0.0/12"))
    asked = exclusive("turin", "10.65.0.0/16", 1)
    (refusal,) = tell(core, asked, first=20).refused
    assert (refusal.other, "10.65.0.0/16 overlaps the reserved 10.64.0.0/12" in refusal.reason) == ("Cluster/milan/milan", True)
    tell(core, [site("10.65.0.0/16")], first=30)
    assert asked[-1].ref not in core.state.objects, "pods hold it still"
    (refusal,) = tell(core, [asked[-1]], first=31).refused
    assert "10.65.0.0/16 overlaps the reserved 10.65.0.0/16" in refusal.reason
    for sequence in (40, 41):
        tell(core, [site()], first=sequence)
        assert asked[-1].ref in core.state.objects
        assert remaps(core)["milan-turin in milan"][1] == ("10.65.0.0/16", "10.51.0.0/16")
        assert remaps(core)["milan-rome in milan"][1] == (seen, real), "what was given stays, though it could be free of a remap by now"
    assert remaps(restarted(core)) == remaps(core)


def test_all_events_again_give_the_same_map() -> None:
    """The case's events, from the first, to a planner that reads what the one before wrote: nothing changes."""
    events = [site("10.64.0.0/12", "10.65.0.0/16"), *outside("rome", "10.66.0.0/16", 0), *exclusive("turin", "10.65.0.0/16", 1)]
    events += [site("10.65.0.0/16"), site(), site()]
    core = Core()
    tell(core, events)
    before = remaps(core)
    again = restarted(core)
    outcome = tell(again, events)
    assert (remaps(again), outcome.admitted, outcome.refused) == (before, [], [])
    assert again.allocations.take_changes() == []


def test_pods_and_nodes_may_lie_in_what_is_reserved() -> None:
    """A reservation keeps remaps away, and nothing else."""
    held = cluster("rome", reserved=(Prefix("10.192.0.0/10"), Prefix("172.18.0.0/16"), Prefix("10.200.0.0/16")))
    assert tell(Core(), [held, *two_clusters()[1:]]).refused == []


@pytest.mark.parametrize("order", [1, -1])
def test_a_given_remap_inside_what_is_reserved_is_refused(order: int) -> None:
    """Whichever comes first: the other one is refused, and names it."""
    core = Core()
    held = cluster("rome", reserved=(Prefix("10.61.128.0/24"),))
    others = [item for item in two_clusters() if not isinstance(item, Peering)]
    tell(core, others)
    first, second = [held, peering()][::order]
    tell(core, [first], first=50)
    (refusal,) = tell(core, [second], first=60).refused
    assert refusal.other == first.ref
    assert "10.61.0.0/16 overlaps the reserved 10.61.128.0/24" in refusal.reason


# What is established -------------------------------------------------------------------------------------------------------------------


def allocated(core: Core) -> Prefix:
    """How rome sees milan's pods."""
    return remaps(core)["rome-milan in rome"][0][0]


def exclusive_in_rome(prefix: Prefix) -> list[Topology]:
    """Turin, which rome wants to see under this very prefix."""
    first = PeeringEnd(cluster=Name("rome"), gateway=Name("second"), remap_external=(prefix,))
    second = PeeringEnd(cluster=Name("turin"), gateway=Name("gateway"))
    home = cluster("turin", pod_prefixes=(Prefix("10.21.0.0/16"),), external_prefixes=(Prefix("10.51.0.0/16"),))
    joint = Peering(name=Name("rome-turin"), cluster=Name("rome"), ends=(first, second))
    return [home, gateway("rome", "second", 40), gateway("turin", host=40), joint]


def test_a_peering_that_comes_back_has_its_remap_again() -> None:
    """What is given back is kept, over a restart too; deleting twice changes nothing."""
    core = Core()
    tell(core, joined())
    before = remaps(core)
    delete(core, bare().ref, 50)
    delete(core, bare().ref, 51)
    again = restarted(core)
    assert again.allocations.take_changes() == []
    tell(again, [bare()], first=60)
    assert remaps(again) == before


def test_pools_move_nothing_that_is_in_use_and_take_back_what_is_kept() -> None:
    """Another pool leaves a running peering alone; one that was away meanwhile gets its remap from the pool that there is."""
    core, other = Core(), Prefix("10.128.0.0/12")
    tell(core, joined())
    before = allocated(core)
    assert tell(core, [pooled("rome", other)], first=50).refused == []
    assert allocated(core) == before
    delete(core, bare().ref, 60)
    tell(core, [pooled("rome", other, mtu=1400), bare()], first=70)
    assert other.contains(allocated(core))


def test_a_remap_that_is_given_comes_first_and_leaves_the_allocated_one_kept() -> None:
    """An end that gives a remap for a while, and then none, sees the far end as before."""
    core = Core()
    tell(core, joined())
    before = remaps(core)
    tell(core, [peering()], first=50)
    assert remaps(core)["rome-milan in rome"][0][0] == "10.61.0.0/16"
    tell(core, [bare()], first=60)
    assert remaps(core) == before


def test_a_far_cluster_that_grows_gets_what_it_lacks() -> None:
    """A further pod prefix of milan overlaps rome's external one: it is remapped, and what was there stays as it was."""
    core = Core()
    tell(core, joined())
    before = remaps(core)["rome-milan in rome"]
    wider = pooled("milan", pod_prefixes=(Prefix("10.70.5.0/24"), Prefix("10.200.0.0/16")))
    assert tell(core, [wider], first=50).refused == []
    (seen, real), *others = remaps(core)["rome-milan in rome"]
    assert (real, seen.length, others) == ("10.70.5.0/24", 24, before)
    assert overlaps(core) == []


def test_lost_allocations_are_read_back_from_plans() -> None:
    """Nothing moves when all that is lost are the allocations: not even what the order of arrival had decided."""
    core = Core()
    tell(core, [*HUB, *outside("late", "10.9.0.0/16", 0), *outside("next", "10.51.0.0/16", 1), *outside("last", "10.51.0.0/16", 2)])
    assert remaps(core)["milan-next in milan"][1] == ("10.51.0.0/16", "10.51.0.0/16"), "the first one is seen as it is"
    plans = {step.host: step.plan for step in core.steps()}
    second = Core()
    second.restore([(item, core.sequences[ref]) for ref, item in reversed(core.state.objects.items())], plans, {})
    assert remaps(second) == remaps(core)
    written = {(home, name) for what, home, name in second.allocations.take_changes() if what == "remaps"}
    assert written == core.allocations.remaps.keys()


# Exhaustion ------------------------------------------------------------------------------------------------------------------------------


def test_a_pool_without_room_is_named() -> None:
    """The refusal names the prefix, the pool and both clusters; a larger pool lets the peering in."""
    core = Core()
    narrow = [pooled("rome", "10.96.0.0/17"), *joined()[1:]]
    (refusal,) = tell(core, narrow).refused
    assert (refusal.name, refusal.field, refusal.other) == ("rome-milan", "$.ends[0].remapPods", "Cluster/rome/rome")
    assert "10.200.0.0/16 of Cluster/milan/milan needs a remap" in refusal.reason
    assert "no /16 is free in the pool 10.96.0.0/17 of Cluster/rome/rome" in refusal.reason
    tell(core, [pooled("rome", "10.96.0.0/16")], first=50)
    assert allocated(core) == "10.96.0.0/16"


def test_without_a_pool_a_remap_is_asked_for() -> None:
    """As before there were pools, and the refusal says what a pool would be good for."""
    items = [cluster("rome", pools=(Prefix("fd40::/10"),)), *joined()[1:]]
    (refusal,) = tell(Core(), items).refused
    assert refusal.field == "$.ends[0].remapPods[0]"
    assert "10.200.0.0/16 overlaps 10.200.0.0/16 of Cluster/rome/rome" in refusal.reason
    assert "or Cluster/rome/rome an IPv4 pool to take one from" in refusal.reason


def test_the_last_free_prefix_is_found_and_a_kept_one_given_out_last() -> None:
    """A pool of four: three peerings and one that is gone; the next one gets what is kept, and the one after is refused."""
    core = Core()
    tell(core, [pooled("milan", "10.96.0.0/14", pod_prefixes=(Prefix("10.9.0.0/16"),), external_prefixes=())])

    def more(number: int) -> list[Topology]:
        return outside(f"c{number}", "10.9.0.0/16", number)

    for number in range(4):
        assert tell(core, more(number), first=10 * (number + 1)).refused == []
    kept = remaps(core)["milan-c3 in milan"][1]
    delete(core, "Peering/milan/milan-c3", 60)
    assert tell(core, more(4), first=70).refused == []
    assert remaps(core)["milan-c4 in milan"][1] == kept
    (refusal,) = tell(core, more(5), first=80).refused
    assert "no /16 is free in the pool 10.96.0.0/14 of Cluster/milan/milan" in refusal.reason
    (refusal,) = tell(core, [more(3)[-1]], first=90).refused
    assert refusal.other == "Cluster/milan/milan"
    assert overlaps(core) == []


@pytest.mark.parametrize(
    "pools,length,start,blockers,found",
    [
        (["10.96.0.0/12"], 16, 0, [], "10.96.0.0/16"),
        (["10.96.0.0/12"], 16, 15, [], "10.111.0.0/16"),
        (["10.96.0.0/12"], 16, 16, [], "10.96.0.0/16"),
        (["10.96.0.0/12"], 16, 15, ["10.111.0.9/32"], "10.96.0.0/16"),
        (["10.96.0.0/12"], 16, 3, ["10.96.0.0/13"], "10.104.0.0/16"),
        (["10.96.0.0/12"], 16, 3, ["0.0.0.0/0"], None),
        (["10.96.0.0/12"], 11, 3, [], None),
        (["10.96.0.0/16", "10.98.0.0/16"], 16, 1, ["10.98.0.0/16"], "10.96.0.0/16"),
        (["10.96.0.0/16", "10.98.0.0/15"], 16, 2**100, ["10.96.0.0/14"], None),
        (["fd40::/10"], 64, 2**80 + 7, [], "fd40:0:0:7::/64"),
        (["fd40::/10"], 64, 7, ["fd40::/11"], "fd60::/64"),
        (["fd40::/10"], 64, 7, ["fd40::/11", "fd60::/11"], None),
        ([], 16, 1, [], None),
    ],
)
def test_the_first_free_prefix(pools: list[str], length: int, start: int, blockers: list[str], found: str | None) -> None:
    """From a start on and around, over large blockers in one step, however large the pool is."""
    assert first_free(list(map(Prefix, pools)), length, start, list(map(Prefix, blockers))) == found


# Any order -------------------------------------------------------------------------------------------------------------------------------


HUB = [pooled("milan", "10.96.0.0/11", pod_prefixes=(Prefix("10.9.0.0/16"),), external_prefixes=()), node("m", 9, "milan", pod_prefixes=())]


def test_a_state_on_its_own_sees_what_peers_give() -> None:
    """Without allocations, prefixes are seen as they are said."""
    state = State(two_clusters())
    assert seen_prefixes(state, Attachment(peering(), 0))[0] == ("10.61.0.0/16", "10.200.0.0/16")
