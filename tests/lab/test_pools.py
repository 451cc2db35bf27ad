"""Remaps from pools on the real kernel: pods whose addresses are the same reach each other though nobody gave a remap."""

from __future__ import annotations

import pytest

from schemas import codec, subjects
from schemas.allocation import Remaps
from schemas.topology import Cluster, Gateway, Node, Peering, PeeringEnd, Pod
from schemas.values import Address, Name, Prefix

pytestmark = pytest.mark.privileged

SITES = ("lima", "oslo")
POOL = Prefix("10.96.0.0/12")
EDGES = {"first": "10.200.0.0", "near": "10.200.0.5", "mid": "10.200.7.5", "last": "10.200.255.255"}
"""Pods of lima at the edges of its prefix, none inside its node's."""


def sites() -> list:
    """Two clusters whose pods have the addresses of all others, each with a pool; and no peering."""
    found: list = []
    for number, name in enumerate(map(Name, SITES), start=2):
        node = Node(name=Name("worker"), cluster=name, addresses=(Address(f"172.18.{number}.11"),), pod_prefixes=(Prefix("10.200.1.0/24"),))
        found += [
            Cluster(
                name=name,
                pod_prefixes=(Prefix("10.200.0.0/16"),),
                internal_prefixes=(Prefix(f"10.{80 + number}.0.0/16"),),
                pools=(POOL,),
            ),
            Gateway(name=Name("edge"), cluster=name, addresses=(Address(f"172.18.{number}.10"),)),
            node,
            Pod(name=Name("desk"), cluster=name, node=node.name, addresses=(Address("10.200.1.10"),)),
        ]
    for name, address in EDGES.items():
        found.append(Pod(name=Name(name), cluster=Name("lima"), node=Name("worker"), addresses=(Address(address),)))
    return found


def joined() -> Peering:
    ends = tuple(PeeringEnd(cluster=Name(name), gateway=Name("edge")) for name in SITES)
    return Peering(name=Name("lima-oslo"), cluster=Name("lima"), ends=ends)


async def allocated(live) -> dict[str, Prefix]:
    """How each site sees the other's pods, as anybody may read it."""
    async with live.broker("reader") as broker:
        last = await broker.last("ALLOCATION", subjects.allocation("remaps", "lima", "lima-oslo"))
    assert last is not None
    return {one.cluster: one.seen for one in codec.decode(last.data, Remaps).remaps}


async def test_pods_reach_each_other_by_remaps_from_pools(mesh, live):
    """Every pod is reached at the prefix that was allocated, with its host part, at the edges of the prefix too; the same after the planner
    was killed, and after the peering was away."""
    await live.publish(*sites(), joined())
    given = await allocated(live)
    assert given.keys() == set(SITES)
    assert all(POOL.contains(prefix) and prefix.length == 16 for prefix in given.values())
    checks = await live.carries()
    assert sum("oslo/desk → lima/" in check.name for check in checks) == 2 * (1 + len(EDGES))
    for name, address in EDGES.items():
        walk = live.walk("oslo/desk", f"lima/{name}")
        assert (walk.dial, walk.seen_destination) == (Prefix("10.200.0.0/16").translate(Address(address), given["oslo"]), address)
    listing = mesh.run("oslo.edge", "nft", "list", "table", "inet", "meshmark.lima.lima-oslo")
    assert f"{given['oslo']} : 10.200.0.0/16" in listing
    assert "dnat ip prefix to ip daddr map @to_real" in listing
    await mesh.kill("planner")
    await live.delete(joined())
    await live.publish(joined())
    assert await allocated(live) == given
    assert len(await live.carries()) == len(checks)
