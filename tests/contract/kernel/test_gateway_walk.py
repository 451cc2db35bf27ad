"""What a gateway's own plan does to packets: one prefix stands for another as a whole, address by address, both ways.

A gateway with one node and one tunnel: the plan's tables, rules and routes, over links that lead here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.host_objects import LinkAddress, PlanObject, PolicyRule, Route
from services.kernel.linux import LinuxKernel
from services.kernel.transaction import Change, changes
from tests.contract.kernel.firewall_host import Host
from tests.contract.kernel.wires import Seen, Wires
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters

pytestmark = [pytest.mark.privileged, pytest.mark.any_kernel]

NODE, TUNNEL = "mo.worker-1", "mt.0"
HOSTS = ("0.0", "0.5", "7.5", "255.255")
POD = ("10.200.1.9", 4000)


def hold(host: Host, objects: dict[str, PlanObject], state_dir: Path) -> None:
    """The tables, rules and routes of a plan."""
    nft = {key: item for key, item in objects.items() if item.layer == "nft"}
    host.call(host.engine.commit, changes({}, nft), None)
    kernel = host.call(LinuxKernel, state_dir)
    for item in objects.values():
        if isinstance(item, LinkAddress):
            host.run("ip", "address", "add", f"{item.address}/{item.length}", "dev", item.link)
    for item in sorted(objects.values(), key=lambda item: isinstance(item, Route) and any(hop.via for hop in item.hops)):
        if isinstance(item, PolicyRule | Route):
            host.call(kernel.write, Change(None, item))
    host.call(kernel.close)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Wires]:
    host = Host()
    try:
        wires = Wires(host, (NODE, TUNNEL))
        for link in (NODE, TUNNEL):
            host.run("ip", "link", "set", link, "arp", "off")
        hold(host, settled_plans([*two_clusters(1, 1), *keys()])[ROME_GATEWAY].objects(), tmp_path)
        yield wires
        wires.close()
    finally:
        host.close()


@pytest.mark.parametrize("far", HOSTS)
def test_every_address_of_a_remap_leads_to_the_one_with_its_host_part(gateway: Wires, far: str) -> None:
    """The first, the last and others: never to one address of the prefix, nor to any; the answer has the address that was dialled."""
    out = gateway.passes(NODE, POD, (f"10.61.{far}", 80))
    assert out == Seen(TUNNEL, POD, (f"10.200.{far}", 80))
    back = gateway.passes(TUNNEL, (f"10.200.{far}", 80), POD)
    assert back == Seen(NODE, (f"10.61.{far}", 80), POD)


@pytest.mark.parametrize("far", HOSTS)
def test_every_pod_of_the_other_cluster_is_seen_with_its_host_part(gateway: Wires, far: str) -> None:
    """What comes out of the tunnel has an address that is one of ours as well, and is seen under the remap."""
    found = gateway.passes(TUNNEL, (f"10.200.{far}", 4000), ("10.200.1.9", 80))
    assert found == Seen(NODE, (f"10.61.{far}", 4000), ("10.200.1.9", 80))
