"""What hosts send to their broker, on the real kernel: it passes whatever others mark or drop, and is never a remote cluster's."""

from __future__ import annotations

import socket

import pytest
from msgspec.structs import replace

from schemas.firewall import FirewallChain, FirewallConfiguration
from schemas.objects import HostPattern, HostSelector
from schemas.topology import Cluster
from schemas.values import IPV4, Name, Prefix
from services.cli.lab import namespaces
from services.cli.lab.layout import BROKER, PREFIX
from tests.lab.test_fail_closed import stopped

pytestmark = pytest.mark.privileged

MARK_ALL = "table inet foreign {{ chain out {{ type route hook output priority mangle; meta mark set {mark}; }}; }}"
"""Another agent that takes the bits of a class for its own."""
FAR_GATEWAY = "172.18.1.10"
NOBODY = 1
"""A port that nobody listens on: who is reached says so."""


def reaches(host: str, address: str) -> bool:
    """Whether a TCP segment from a host arrives: it is answered, if only with a reset."""
    with namespaces.inside(f"{PREFIX}{host}", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as opened:
        opened.settimeout(1.5)
        try:
            opened.connect((address, NOBODY))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return True


def controlled(mesh) -> Cluster:
    rome = mesh.object("Cluster/rome/rome")
    return replace(rome, control=(BROKER[IPV4].host_prefix,))


@pytest.mark.parametrize("mark", ["0xff00", "0xfe00"], ids=["outgoing", "incoming"])
async def test_a_gateway_reaches_its_broker_whatever_others_mark(mesh, live, mark: str):
    """With all that it sends marked as of a class, only what is for the broker leaves it; and without its rule, nothing does."""
    await live.publish(controlled(mesh))
    assert reaches("rome.gateway", BROKER[IPV4])
    assert reaches("rome.gateway", FAR_GATEWAY)
    mesh.run("rome.gateway", "nft", MARK_ALL.format(mark=mark))
    try:
        assert reaches("rome.gateway", BROKER[IPV4])
        assert not reaches("rome.gateway", FAR_GATEWAY)
        # The applier hears, acts and reports over that very connection.
        before = live.board.reports["rome", "gateway"].generation
        await live.publish(replace(controlled(mesh), external_prefixes=(Prefix("10.75.0.0/16"),)), settle=False)
        await live.eventually(lambda: live.board.reports["rome", "gateway"].generation > before, "the gateway reports")
        with stopped(mesh, ["rome.gateway"]):
            mesh.run("rome.gateway", "ip", "rule", "del", "priority", "889")
            assert not reaches("rome.gateway", BROKER[IPV4])
            mesh.run(
                "rome.gateway", "ip", "rule", "add", "iif", "lo", "to", BROKER[IPV4], "lookup", "main", "priority", "889", "protocol", "77"
            )
    finally:
        mesh.run("rome.gateway", "nft", "delete", "table", "inet", "foreign")
    await live.publish(mesh.object("Cluster/rome/rome"))


async def test_a_node_reaches_its_broker_whatever_its_set_of_remote_prefixes_holds(mesh, live):
    """Somebody adds everything to the set whose packets must go by the overlay: only what is for the broker leaves by the uplink."""
    await live.publish(controlled(mesh))
    with stopped(mesh, ["rome.worker-1"]):
        add = "add element inet meshmark.rome.rome-milan remote { 128.0.0.0/2 }"
        mesh.run("rome.worker-1", "nft", add)
        assert reaches("rome.worker-1", BROKER[IPV4])
        assert not reaches("rome.worker-1", FAR_GATEWAY)
        mesh.run("rome.worker-1", "nft", add.replace("add", "delete", 1))
        assert reaches("rome.worker-1", FAR_GATEWAY)


async def test_a_published_firewall_cannot_lock_a_host_out(mesh, live):
    """Chains that drop all that a host sends and hears let its broker through: the host reports, and the firewall can be deleted again."""
    await live.publish(controlled(mesh))
    chains = tuple(FirewallChain(name=f"on_{hook}", hook=hook, priority="raw", policy="drop") for hook in ("prerouting", "output"))
    hosts = HostSelector(names=(HostPattern("worker-1"),))
    walls = FirewallConfiguration(name=Name("walls"), cluster=Name("rome"), hosts=hosts, chains=chains)
    await live.publish(walls)
    assert reaches("rome.worker-1", BROKER[IPV4])
    assert not reaches("rome.worker-1", FAR_GATEWAY)
    await live.delete(walls)
    assert reaches("rome.worker-1", FAR_GATEWAY)


async def test_a_remote_cluster_holds_no_broker(mesh, live):
    """A control address inside the prefix by which the far pods are seen is refused, and names both; the broker is reached as before."""
    after = len(live.board.refusals)
    rome = replace(mesh.object("Cluster/rome/rome"), control=(Prefix("10.61.0.9/32"),))
    await live.feed.publish(rome)
    refusal = await live.refusal(rome.ref, after)
    assert refusal.other == "Peering/rome/rome-milan"
    assert "10.61.0.0/16 of Peering/rome/rome-milan overlaps the control prefix 10.61.0.9/32 of Cluster/rome/rome" in refusal.reason
    await live.publish(mesh.object(rome.ref))
