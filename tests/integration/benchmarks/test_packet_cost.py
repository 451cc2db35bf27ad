"""Every gateway that is measured does the same work: the same packets come out of it, translated alike. Nothing is timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from benchmarks import gateways, seed_rules
from benchmarks.figures import packet_cost
from benchmarks.figures.packet_cost import PLAIN, Traffic
from benchmarks.figures.rules_per_gateway import compiled
from benchmarks.gateways import Gateway
from services.cli.lab import namespaces
from services.runtime.errors import Transient

pytestmark = pytest.mark.privileged
TUNNELS, NODES = 3, 12


@pytest.fixture(scope="module")
def plan():
    return compiled("per-node", TUNNELS, NODES)


@pytest.fixture(scope="module")
def nodes(plan):
    return seed_rules.targets(plan)


@pytest.fixture(scope="module")
def made(plan, nodes) -> Iterator[Mapping[str, Gateway]]:
    fillings = packet_cost.fillings(plan, nodes)
    before = namespaces.existing()
    try:
        with gateways.standing(plan, fillings) as found:
            yield found
    finally:
        namespaces.remove(namespaces.existing() - before)


@pytest.fixture(params=["last-node", "any-node", "outgoing"])
def traffic(request, plan, nodes) -> Traffic:
    kinds = (
        packet_cost.last_node(nodes, TUNNELS),
        packet_cost.any_node(nodes, TUNNELS),
        packet_cost.outgoing(nodes, list(gateways.tunnel_addresses(plan))),
    )
    (found,) = [kind for kind in kinds if kind.name == request.param]
    return found


def test_all_packets_come_through_each_gateway_under_the_name_that_they_should_have(made, traffic):
    for name, gateway in made.items():
        packet_cost.require_arrival(gateway, traffic, traffic.names[name != PLAIN])


def test_a_gateway_that_does_not_translate_is_found_out(made, traffic):
    with pytest.raises(Transient, match="the first one by"):
        packet_cost.require_arrival(made[PLAIN], traffic, traffic.names[1])
