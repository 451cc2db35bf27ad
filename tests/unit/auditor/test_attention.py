"""What is looked at next: by events, which of them count, who is suspected, which links fell, and rounds without events."""

from __future__ import annotations

import itertools

import pytest

from schemas.drift import DriftLayer, Suspect
from schemas.host_objects import Route
from services.auditor.attention import QUIET, Attention, Rounds
from services.auditor.findings import LAYERS, LINKED
from services.kernel.events import KernelEvent
from tests.topologies import ROME_GATEWAY, settled_plans, two_clusters

PLAN = settled_plans(two_clusters())[ROME_GATEWAY]
OWN = next(hop.link for item in PLAN.objects().values() if isinstance(item, Route) for hop in item.hops)


def following() -> Attention:
    made = Attention()
    made.follow(PLAN)
    assert made.take() == (LAYERS, {})
    return made


@pytest.mark.parametrize(
    "event,layers",
    [
        (KernelEvent("nft"), {"nft"}),
        (KernelEvent("rule"), {"rule"}),
        (KernelEvent("route"), {"route"}),
        (KernelEvent("link", link=OWN), LINKED),
        (KernelEvent("link", link="veth0"), set()),
        (KernelEvent("address", link=OWN), {"route", "address"}),
        (KernelEvent("address", link="veth0"), {"route"}),
        (KernelEvent("address"), {"route", "address"}),
        (KernelEvent("all", overrun=True), set(LAYERS)),
    ],
)
def test_an_event_leads_to_the_layers_that_it_may_be_about(event: KernelEvent, layers: set[DriftLayer]) -> None:
    """A link of ours may have taken all that was on it along; links of others, as pods', are passed over."""
    attention = following()
    assert attention.note(event) == bool(layers)
    assert set(attention.take()[0]) == layers
    assert attention.take()[0] == ()


def test_the_first_at_each_layer_is_the_suspect() -> None:
    """Who repairs comes after who broke; whose link it was must be known, and a layer without events has no suspect."""
    attention = following()
    for event in (
        KernelEvent("route", 3, "ip"),
        KernelEvent("route", 4, "meshmark"),
        KernelEvent("link", 5, "ip", link=OWN, kind="down"),
        KernelEvent("link", 6, "docker", link="veth0"),
        KernelEvent("address", 7, "docker", link="veth0"),
        KernelEvent("address", 8, "dhclient"),
    ):
        attention.note(event)
    seen = {"route": Suspect(3, "ip"), "link": Suspect(5, "ip")}
    assert attention.suspects() == seen
    assert attention.take()[1] == seen
    assert attention.take()[1] == {}


def test_a_link_that_fell_is_remembered_until_it_is_whole() -> None:
    """A look that finds nothing of it forgets it, but not when it fell again after what was seen."""
    attention = following()
    for kind in ("new", "down", "new"):
        attention.note(KernelEvent("link", link=OWN, kind=kind))
    seen = attention.fallen()
    assert seen.keys() == {OWN}
    attention.forget(seen, {f"link {OWN}"})
    assert attention.fallen() == seen
    attention.note(KernelEvent("link", link=OWN, kind="delete"))
    attention.forget(seen, set())
    assert attention.fallen().keys() == {OWN}
    attention.forget(attention.fallen(), set())
    assert attention.fallen() == {}


def test_rounds_come_once_in_their_period_give_or_take_a_tenth() -> None:
    """The short one does not put the long one off, and neither is ever far from its time."""
    rounds = Rounds({LAYERS: 300.0, QUIET: 10.0}, 0.0)
    now_s, quiet, whole = 0.0, [], []
    while now_s < 1000.0:
        now_s = rounds.next_s()
        (whole if rounds.due(now_s) == set(LAYERS) else quiet).append(now_s)
    assert 85 <= len(quiet) <= 115
    assert 2 <= len(whole) <= 4
    assert all(8.9 <= later - earlier <= 11.1 for earlier, later in itertools.pairwise(quiet))
    assert rounds.due(now_s) == set()
