"""Flows of pods that leave their cluster through a chosen node: followed up to there, and out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from schemas.topology import Cluster, Node
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family
from services.auditor.trace.trails import Trail
from services.auditor.trace.verdicts import courses
from services.cli.files import load
from services.cli.lab import namespaces
from services.cli.trace.ends import session
from tests.sites import Site
from tests.topologies import EXAMPLES, pod
from tests.tracing import ONE, TWO, echo, flows, recording

pytestmark = pytest.mark.privileged

OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
EXIT = {IPV4: Address("172.18.0.12"), IPV6: Address("2001:db8:18::12")}
"""As whom the outside sees the pods of worker-1."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The cluster of examples/egress.yaml, with a second pod on worker-1."""
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    made = Site(tmp_path_factory.mktemp("egress"), load([EXAMPLES / "egress.yaml"]), Node, OUTSIDE.values())
    try:
        made.make()
        made.say([pod("cart", "worker-1", "10.200.1.11")])
        yield made
    finally:
        made.close()


def turn_to(site: Site, routing: str) -> None:
    cluster = site.object("Cluster/rome/rome")
    assert isinstance(cluster, Cluster)
    site.say([replace(cluster, routing=routing)])


def traced(site: Site, ends: tuple[str, str], place: str, to: Address) -> list[Trail]:
    """The packets of a traced flow, as all hosts on its way tell of it, while `place` has an echo from `to` of one that has begun."""
    core = site.mesh.core
    wanted = session(core.state, core.allocations, ends, None, 60)
    hosts = {host: site.mesh.hosts[host] for host in wanted.hosts}
    with recording(hosts) as before:
        assert echo(place, to, before, count=2, ident=1) == 2
    with recording(hosts) as recorder:
        for wish in set(wanted.hosts.values()):
            recorder.lend(wish)
        assert echo(place, to, recorder) == 1
    told = [event for host, recorded in recorder.found.items() for event in flows(core.published[host], recorded)]
    return wanted.trails(told)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ["native", "overlay"])
def test_a_flow_is_followed_through_the_node_that_lets_it_out(site: Site, routing: str, family: Family) -> None:
    """Both ways: encrypted between the pod's node and that one, which gives it its own address and takes the answer; in clear outside."""
    turn_to(site, routing)
    found = traced(site, ("rome/shop", OUTSIDE[family]), "rome.pod.shop", OUTSIDE[family])
    assert [(trail.way, trail.nodes()) for trail in found] == [("forward", [str(ONE), str(TWO)]), ("reply", [str(TWO), str(ONE)])]
    forward, reply = courses(found)
    assert [(hop.source, hop.destination, hop.verdict) for hop in forward.hops] == [
        (str(ONE), str(TWO), "encrypted"),
        (str(TWO), "?", "plaintext"),
    ]
    assert [(hop.source, hop.destination, hop.verdict) for hop in reply.hops] == [
        ("?", str(TWO), "plaintext"),
        (str(TWO), str(ONE), "encrypted"),
    ]
    out, back = found[0].at(str(TWO))[-1], found[1].at(str(TWO))[0]
    assert (out.trace_observation_point, back.trace_observation_point) == ("TO_NETWORK", "FROM_NETWORK")
    assert out.ip is not None
    assert back.ip is not None
    assert EXIT[family] in (out.ip.source, out.ip.source_xlated)
    assert back.ip.destination == EXIT[family]


@pytest.mark.parametrize("place", ["rome.worker-2", "rome.pod.cart"])
def test_what_others_send_as_the_same_address_is_not_of_the_flow(site: Site, place: str) -> None:
    """The node itself, and another pod that the policy leads out, whose answers come to the address as which the traced one leaves."""
    turn_to(site, "native")
    assert traced(site, ("rome/shop", OUTSIDE[IPV4]), place, OUTSIDE[IPV4]) == []
