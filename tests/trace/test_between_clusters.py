"""A flow between pods of two clusters, traced on all four hosts: the tunnel's points, and what each step translates.

The tunnel between the gateways encrypts, the overlay to the nodes does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.topology import Gateway, Peering, Pod
from schemas.values import FAMILIES, Family
from services.auditor.trace.trails import Trail
from services.cli.files import load
from services.cli.lab import namespaces
from services.cli.lab.expected import joined
from services.cli.trace.ends import Session, session
from tests.sites import Site
from tests.topologies import DUAL_STACK
from tests.tracing import drawn, echo, flows, recording

pytestmark = pytest.mark.privileged

GOLDEN = Path(__file__).parent / "golden"
POINTS = (
    ("FROM_ENDPOINT", "TO_OVERLAY", "TO_NETWORK"),
    ("FROM_NETWORK", "FROM_OVERLAY", "TO_CRYPTO", "TO_NETWORK"),
    ("FROM_NETWORK", "FROM_CRYPTO", "TO_OVERLAY", "TO_NETWORK"),
    ("FROM_NETWORK", "FROM_OVERLAY", "TO_ENDPOINT"),
)
"""On the node, its gateway, the other gateway and the other node."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two clusters joined by one tunnel, so that it is known by which one a flow goes."""
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    objects = [replace(item, tunnels=1) if isinstance(item, Peering) else item for item in load([DUAL_STACK])]
    made = Site(tmp_path_factory.mktemp("site"), objects, Gateway, ())
    try:
        made.make()
        yield made
    finally:
        made.close()


def traced(site: Site, family: Family) -> tuple[Session, list[Trail]]:
    """One echo request of a flow that has begun, on all hosts of its way."""
    core = site.mesh.core
    wanted = session(core.state, core.allocations, ("rome/shop", "milan/bank"), None, 60)
    hosts = {host: site.mesh.hosts[host] for host in wanted.hosts}
    bank, between = site.object("Endpoint/milan/bank"), joined(site.topology, "rome", "milan", family)
    assert isinstance(bank, Pod)
    assert between is not None
    to = between.dial(next(address for address in bank.addresses if address.family == family))
    with recording(hosts) as before:
        while not echo("rome.pod.shop", to, before, ident=1):
            pass  # the tunnel's session is made
    with recording(hosts) as recorder:
        for wish in set(wanted.hosts.values()):
            recorder.lend(wish)
        assert echo("rome.pod.shop", to, recorder) == 1
    events = [event for host, recorded in recorder.found.items() for event in flows(core.published[host], recorded)]
    return wanted, wanted.trails(events)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_step_shows_its_points_and_its_translation(site: Site, family: Family, record_property: Callable[[str, object], None]) -> None:
    """The request and the answer, on four hosts each, and as the golden transcript has them."""
    wanted, found = traced(site, family)
    seen = [tuple(tuple(event.trace_observation_point for event in trail.at(node)) for node in trail.nodes()) for trail in found]
    assert seen == [POINTS, POINTS]
    assert drawn(found, wanted) == (GOLDEN / f"between-clusters-ipv{family}.txt").read_text(encoding="utf-8")
    for trail in found:
        for event in (event for node in trail.nodes() for event in trail.at(node)):
            record_property("point", f"between clusters {family} {trail.way} {event.node_name} {event.trace_observation_point}")
