"""Flows traced in the kernels of a cluster that encrypts: each packet at each point, and whether it was encrypted.

The seed of this feature has the echo of two pods on two nodes, natively and by an overlay. Names and order of the points are Cilium's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.auditor.trace.trails import Trail
from tests.hosts import NO_GENEVE, has_geneve
from tests.trace.flows import ALL, seen, traced
from tests.trace.site import Rome
from tests.tracing import CASES, drawn

pytestmark = pytest.mark.privileged

RECORDED = Path(__file__).parents[1] / "unit" / "auditor" / "trace" / "golden"
LIVE = Path(__file__).parent / "golden"

NATIVE = (("FROM_ENDPOINT", "TO_STACK", "TO_CRYPTO", "TO_NETWORK"), ("FROM_NETWORK", "FROM_CRYPTO", "TO_ENDPOINT"))
OVERLAY = (("FROM_ENDPOINT", "TO_OVERLAY", "TO_CRYPTO", "TO_NETWORK"), ("FROM_NETWORK", "FROM_CRYPTO", "FROM_OVERLAY", "TO_ENDPOINT"))
IN_CLEAR = (("FROM_ENDPOINT", "TO_STACK", "TO_NETWORK"), ("FROM_NETWORK", "TO_ENDPOINT"))
OVERLAY_IN_CLEAR = (("FROM_ENDPOINT", "TO_OVERLAY", "TO_NETWORK"), ("FROM_NETWORK", "FROM_OVERLAY", "TO_ENDPOINT"))
FROM_NODE = (("FROM_HOST", "TO_CRYPTO", "TO_NETWORK"), NATIVE[1])
TO_NODE = (NATIVE[0], ("FROM_NETWORK", "FROM_CRYPTO", "TO_HOST"))
BETWEEN_NODES = (FROM_NODE[0], TO_NODE[1])
BETWEEN_NODES_IN_CLEAR = (("FROM_HOST", "TO_NETWORK"), ("FROM_NETWORK", "TO_HOST"))
POINTS = {
    **dict.fromkeys(("native", "native-ipv6", "native-over-ipv6"), (NATIVE, NATIVE)),
    **dict.fromkeys((name for name in ALL if name.startswith(("overlay", "geneve"))), (OVERLAY, OVERLAY)),
    "overlay-in-clear": (OVERLAY_IN_CLEAR, OVERLAY_IN_CLEAR),
    "opted-out": (IN_CLEAR, IN_CLEAR),
    "reply-in-clear": (NATIVE, IN_CLEAR),
    "dropped": ((("FROM_ENDPOINT", "TO_STACK"),),),
    "node-to-pod": (FROM_NODE, TO_NODE),
    "node-to-node": (BETWEEN_NODES, BETWEEN_NODES),
    "node-to-node-in-clear": (BETWEEN_NODES_IN_CLEAR, BETWEEN_NODES_IN_CLEAR),
}
"""By case, of the request and of the answer: the points on each node of the way."""


def points(trail: Trail) -> tuple[tuple[str, ...], ...]:
    """On each host in the order of its way, also of the packets that carried it."""
    return tuple(tuple(event.trace_observation_point for event in trail.at(node) if event.verdict == "FORWARDED") for node in trail.nodes())


@pytest.mark.parametrize("name", ALL)
def test_each_packet_is_seen_at_its_points(rome: Rome, name: str, record_property: Callable[[str, object], None]) -> None:
    """The request and the answer of an echo, point by point on both nodes, and as the golden transcript has them.

    What was recorded of some of them leads to the same transcript without a kernel.
    """
    if name.startswith("geneve") and not has_geneve("mm.underlay"):
        pytest.skip(NO_GENEVE)
    wanted, found = traced(rome, ALL[name])
    trails = seen(rome, wanted, found)
    assert tuple(map(points, trails)) == POINTS[name]
    golden = (RECORDED if name in CASES else LIVE) / f"{name}.txt"
    assert drawn(trails, wanted) == golden.read_text(encoding="utf-8")
    for trail in trails:
        for event in (event for node in trail.nodes() for event in trail.at(node)):
            record_property("point", f"{name} {trail.way} {event.node_name} {event.trace_observation_point}")
