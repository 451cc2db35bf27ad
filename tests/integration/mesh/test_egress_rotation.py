"""A node changes its key while pods leave their cluster through another one: nothing of a stream out and back is lost.

The cluster of examples/egress.yaml; outside is the underlay's router, which answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.topology import Cluster
from schemas.values import IPV4, IPV6, Address
from services.cli.files import load
from services.planner.state import HostId
from tests.hosts import NO_GENEVE, LinuxHost, has_geneve
from tests.integration.mesh.turning import turn_over, up
from tests.talks import assert_none_lost, talking, until
from tests.topologies import EXAMPLES
from tests.turnovers import Turnovers

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(300)]

OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
HOSTS = [HostId("rome", f"worker-{number}") for number in (1, 2, 3)]
PODS_NODE, EXIT, _ = HOSTS
STAGES = ["beside", "moved", "rekeyed", "back", "leaving", "done"]
MODES: dict[str, dict[str, object]] = {
    "native": {"strict": "enforce"},
    "vxlan": {"routing": "overlay", "strict": "enforce"},
    "geneve": {"overlay": "geneve", "strict": "enforce"},
}


@pytest.fixture(params=MODES)
def rome(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Turnovers[LinuxHost]]:
    """Three nodes that encrypt; the pods of the first leave through the second."""
    items = load([EXAMPLES / "egress.yaml"])
    (cluster,) = (item for item in items if isinstance(item, Cluster))
    with up(items, HOSTS, tmp_path, OUTSIDE.values()) as found:
        if "overlay" in MODES[request.param] and not has_geneve("mm.underlay"):
            pytest.skip(NO_GENEVE)
        found.hear([replace(cluster, **MODES[request.param])])
        while found.round():
            pass
        yield found


@pytest.mark.any_kernel
@pytest.mark.parametrize("turning", [EXIT, PODS_NODE], ids=["exit", "pod's node"])
async def test_no_packet_is_lost(rome: Turnovers[LinuxHost], turning: HostId) -> None:
    """Whichever of the two changes its key: the pod's requests are heard outside, and it hears the answers."""
    places = [("rome.pod.shop", "underlay", address) for address in OUTSIDE.values()]
    async with talking(places, answered=True) as talks:
        await until(lambda: all(talk.sent > 20 for talk in talks), lambda: None)
        await turn_over(rome, turning, STAGES)
        done = [talk.sent for talk in talks]
        await until(lambda: all(talk.sent > count + 20 for talk, count in zip(talks, done, strict=True)), lambda: None)
    assert_none_lost(talks)
