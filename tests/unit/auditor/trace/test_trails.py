"""Which outer packet carried which inner one, and never more than can be told."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.flow import IP, Correlation, FlowEvent, NftPlace, PointName
from services.auditor.trace.trails import Trail, Way, trails
from services.auditor.trace.verdicts import courses, crossings
from tests.unit.auditor.trace.packets import BEYOND, HERE, THERE, at, found, outer, wrapped

_BY_NODE = {HERE: "HERE", THERE: "THERE", BEYOND: "BEYOND"}


def carriers(trail: Trail) -> list[tuple[str, int | None, str]]:
    return [(_BY_NODE[link.event.node_name], link.event.wg and link.event.wg.counter, link.corr.confidence) for link in trail.outer]


def test_both_hosts_guess_the_same_packet() -> None:
    """The one that left is found by peer, order and length, the one that came by its number, and it fits: that is high, not exact."""
    (trail,) = found(at("TO_CRYPTO"), outer(HERE, 1, 5), outer(THERE, 2, 5), at("FROM_CRYPTO", THERE, 3))
    assert carriers(trail) == [("HERE", 5, "high"), ("THERE", 5, "exact")]


def test_packets_in_between_are_somebody_elses() -> None:
    """Of another length, for another peer, or sent before."""
    events = [
        outer(HERE, 1, 1),
        at("TO_CRYPTO", ms=10),
        outer(HERE, 11, 2, length=172),
        outer(HERE, 12, 3, peer="other"),
        outer(HERE, 13, 4),
    ]
    (trail,) = found(*events)
    assert carriers(trail) == [("HERE", 4, "inferred")]


def test_packets_that_are_alike_keep_their_order() -> None:
    """Each outer packet carries one inner packet."""
    first, second = found(at("TO_CRYPTO"), at("TO_CRYPTO", ms=1, group="b"), outer(HERE, 2, 7), outer(HERE, 3, 8))
    assert (carriers(first), carriers(second)) == ([("HERE", 7, "inferred")], [("HERE", 8, "inferred")])


def test_nothing_is_said_of_what_was_not_seen() -> None:
    """Without an outer packet in time there is none, and a peer that nobody knows fits nothing."""
    (trail,) = found(at("TO_CRYPTO"), outer(HERE, 1, 1, peer=""))
    assert trail.outer == []
    late = replace(outer(HERE, 0, 1), time="2026-01-01T00:00:05.000000Z")
    assert found(at("TO_CRYPTO"), late)[0].outer == []


def test_an_equal_packet_at_the_same_point_is_another_one() -> None:
    """A retransmission has the same headers."""
    assert len(found(at("FROM_ENDPOINT"), at("TO_STACK", ms=1), at("FROM_ENDPOINT", ms=2))) == 2


def test_an_equal_packet_much_later_is_another_one() -> None:
    """Where its host was heard again only after seconds, as of a number of IPv4's that comes round."""
    late = replace(at("FROM_CRYPTO", THERE), time="2026-01-01T00:00:05.000000Z")
    assert len(found(at("TO_CRYPTO"), replace(late, time="2026-01-01T00:00:04.999000Z"))) == 1
    assert len(found(at("TO_CRYPTO"), late)) == 2


def test_equal_addresses_of_both_ends_are_told_apart_by_the_packets_other_points() -> None:
    """Between gateways of clusters that overlap, source and destination may be the same."""

    def ways(event: FlowEvent) -> tuple[Way, ...]:
        return ("forward", "reply") if event.trace_observation_point == "TO_CRYPTO" else ("reply",)

    (trail,) = trails([at("FROM_OVERLAY"), at("TO_CRYPTO", ms=1)], ways, (HERE, THERE))
    assert (trail.way, len(trail.seen)) == ("reply", 2)


def test_a_packet_that_shows_its_way_goes_that_way_whatever_an_equal_one_does() -> None:
    """As of UDP between equal ports, whose answer has the same headers."""

    def ways(event: FlowEvent) -> tuple[Way, ...]:
        return ("forward",) if event.node_name == HERE else ("reply",)

    both = trails([at("FROM_ENDPOINT"), at("FROM_ENDPOINT", THERE, 1)], ways, (HERE, THERE))
    assert [(trail.way, trail.nodes()) for trail in both] == [("forward", [HERE]), ("reply", [THERE])]


def test_an_overlay_packet_is_found_by_what_is_inside() -> None:
    """Not the neighbour of the same length that is nearer; what is inside is not taken for the packet itself."""
    (trail,) = found(
        at("TO_OVERLAY"), wrapped(HERE, 1, "b"), wrapped(HERE, 2), wrapped(THERE, 3), wrapped(THERE, 4, "b"), at("FROM_OVERLAY", THERE, 5)
    )
    assert [event.trace_observation_point for event in trail.seen] == ["TO_OVERLAY", "FROM_OVERLAY"]
    assert [(link.event.uuid, link.corr) for link in trail.outer] == [
        (event.uuid, Correlation("a", "headers", "high")) for event in (wrapped(HERE, 2), wrapped(THERE, 3))
    ]
    (crossing,) = crossings(trail)
    assert (crossing.verdict, {one.confidence for one in crossing.evidence}) == ("plaintext", {"high"})


def test_a_shown_packet_of_others_does_not_keep_one_that_was_not_shown_from_being_inferred() -> None:
    """Where the kernel had no room for it, by length and order, as if none had been shown."""
    blind = replace(wrapped(HERE, 3), ip=None, l4=None, corr=None, length=134)
    (trail,) = found(at("TO_OVERLAY"), wrapped(HERE, 1, "b"), blind)
    assert [(link.event.uuid, link.corr.method) for link in trail.outer] == [(blind.uuid, "order and length")]


def test_fragments_in_overlay_packets_that_were_not_shown_say_how_they_were_found() -> None:
    """By order and the lengths of all of them."""
    tunnel = wrapped(HERE, 1).tunnel
    assert tunnel is not None
    blind = [
        wrapped(HERE, 1 + place, ip=None, l4=None, corr=None, tunnel=replace(tunnel, length=length + 50))
        for place, length in enumerate((1364, 684))
    ]
    (trail,) = found(at("TO_OVERLAY", length=2028), *blind)
    assert [(link.event.outer_length, link.corr.method) for link in trail.outer] == [
        (1414, "order and lengths of fragments"),
        (734, "order and lengths of fragments"),
    ]


def test_a_host_that_dropped_what_the_packet_was_in_is_on_its_way() -> None:
    """As one that drops what comes in clear, and never saw the packet itself. A drop of another packet's is none of it."""
    drop = {"verdict": "DROPPED", "trace_observation_point": "UNKNOWN_POINT"}
    (trail,) = found(at("TO_OVERLAY"), wrapped(HERE, 1), wrapped(THERE, 2, "b", **drop), wrapped(THERE, 3, **drop))
    assert trail.nodes() == [HERE, THERE]
    assert [link.event.uuid for link in trail.outer] == [wrapped(HERE, 1).uuid, wrapped(THERE, 3).uuid]
    assert [(course.verdict, course.dropped) for course in courses([trail])] == [("plaintext", 1)]
    assert [(one.source, one.destination) for one in crossings(trail)] == [(HERE, THERE)]


def test_each_of_several_tunnels_in_a_row_has_its_own_packets() -> None:
    """What a host gets is not what the one before it got, though it is as long."""
    (trail,) = found(
        *(at("TO_CRYPTO"), outer(HERE, 1, 5), outer(THERE, 2, 5), at("FROM_CRYPTO", THERE, 3)),
        *(at("TO_CRYPTO", THERE, 4), outer(BEYOND, 5, 9), at("FROM_CRYPTO", BEYOND, 6)),
        route=(HERE, THERE, BEYOND),
    )
    assert carriers(trail) == [("HERE", 5, "high"), ("THERE", 5, "exact"), ("BEYOND", 9, "inferred")]


def test_fragments_that_fit_on_both_hosts_are_surer_than_on_one() -> None:
    """None of them is as long as the packet: together they are."""
    sizes = (1400 + 60, 624 + 60)  # of 2000 bytes at an MTU of 1400, the first one padded, with the headers of IPv4, UDP and WireGuard
    pieces = [outer(node, 1 + place, place, size) for node in (HERE, THERE) for place, size in enumerate(sizes)]
    (trail,) = found(at("TO_CRYPTO", length=2000), *pieces, at("FROM_CRYPTO", THERE, 5, length=2000))
    assert sorted(carriers(trail)) == [("HERE", 0, "high"), ("HERE", 1, "high"), ("THERE", 0, "exact"), ("THERE", 1, "exact")]


def test_an_overlay_packet_that_was_not_shown_carries_nothing_that_did_not_come_out_of_an_overlay() -> None:
    """A packet at any other point is not in it, though it is as long and was seen right after it came."""
    blind = replace(wrapped(THERE, 1), ip=None, l4=None, corr=None, length=134)
    assert [trail.outer for trail in found(blind, at("TO_ENDPOINT", THERE, 2))] == [[]]
    assert [len(trail.outer) for trail in found(blind, at("FROM_OVERLAY", THERE, 2))] == [1]


def passed(point: PointName, ms: int, number: int, *, group: str = "a", source: str = "10.0.0.1", node: str = HERE) -> FlowEvent:
    """A packet at a point of a passage that the kernel numbers."""
    made = at(point, node, ms, group)
    return replace(made, ip=IP(source, "10.0.0.2", "IPv4"), nft=NftPlace(number), uuid=f"{made.uuid} {number}")


def ours(event: FlowEvent) -> tuple[Way, ...]:
    """A flow from one address, or from what its node gives it."""
    return ("forward",) if event.ip and event.ip.source in ("10.0.0.1", "172.18.0.11") else ()


def test_what_a_host_makes_of_a_packet_is_the_same_packet() -> None:
    """Whatever its source and its port become, known or not; and where it comes to another host, that is found by what it has become."""
    for source in ("172.18.0.11", "192.0.2.9"):
        sent = [passed("FROM_ENDPOINT", 0, 7), passed("TO_NETWORK", 1, 7, group="b", source=source)]
        came = passed("FROM_NETWORK", 2, 9, group="b", source="10.0.0.1", node=THERE)
        (trail,) = trails([*sent, came], ours, (HERE, THERE))
        assert trail.seen == [*sent, came]
    dropped = replace(passed("UNKNOWN_POINT", 1, 7, group="b", source="192.0.2.9"), verdict="DROPPED")
    (trail,) = trails([passed("FROM_ENDPOINT", 0, 7), dropped], ours, (HERE, THERE))
    assert trail.is_dropped


def test_what_a_host_makes_of_another_packet_is_none_of_the_flow() -> None:
    """Though it then looks as if it were: a pod's packet with its node's address. A number that comes again is another packet's."""
    others = [passed("FROM_ENDPOINT", 0, 7, source="10.0.0.9"), passed("TO_NETWORK", 1, 7, source="172.18.0.11")]
    own = [passed("FROM_HOST", 2, 7, source="172.18.0.11"), passed("TO_NETWORK", 3, 7, source="172.18.0.11")]
    assert [trail.seen for trail in trails([*others, *own], ours, (HERE, THERE))] == [own]
    assert [trail.seen for trail in trails([*own, *others], ours, (HERE, THERE))] == [own]


def test_a_packet_of_a_number_that_comes_again_is_not_the_one_before() -> None:
    """Of which nothing more was told: as one that was dropped where nobody saw it."""
    first, second = passed("FROM_ENDPOINT", 0, 7), [passed("FROM_ENDPOINT", 5, 7, group="b"), passed("TO_NETWORK", 6, 7, group="b")]
    assert [trail.seen for trail in trails([first, *second], ours, (HERE, THERE))] == [[first], second]
    other = passed("FROM_HOST", 5, 7, group="b", source="172.18.0.11")
    assert [trail.seen for trail in trails([first, other], ours, (HERE, THERE))] == [[first], [other]]


def test_equal_packets_are_followed_each_to_the_next_host() -> None:
    """As retransmissions; and where their beginnings were lost, a number that comes again is another packet."""
    events = [at("FROM_ENDPOINT"), at("FROM_ENDPOINT", ms=1), at("FROM_CRYPTO", THERE, 2), at("FROM_CRYPTO", THERE, 3)]
    assert [len(trail.seen) for trail in found(*events)] == [2, 2]
    again = [passed("TO_NETWORK", 0, 7), passed("TO_NETWORK", 1, 7, group="b")]
    assert [trail.seen for trail in trails(again, ours, (HERE, THERE))] == [[again[0]], [again[1]]]
