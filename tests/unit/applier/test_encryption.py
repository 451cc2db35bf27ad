"""What a host tells of its part in its cluster's encryption: planned and real peers by node, and packets by point."""

from __future__ import annotations

from schemas.encryption import Point
from schemas.host_objects import WireguardPeer
from schemas.plan import HostPlan
from schemas.values import Key, Name
from services.applier.core import Applier
from services.applier.encryption import PEERS_MAX
from services.kernel.fake import FakeHost, FakeKernel
from services.planner.state import HostId
from tests.topologies import encrypting, settled_plans

PLAN = settled_plans(encrypting(strict="off"))[HostId("rome", "worker-1")]
PEER = next(item for item in PLAN.objects().values() if isinstance(item, WireguardPeer))


def held() -> tuple[FakeHost, Applier]:
    host = FakeHost()
    applier = Applier(FakeKernel(host), lambda: 9.0)
    assert applier.apply(PLAN, 1, 1).outcome == "applied"
    return host, applier


def test_peers_by_node_and_packets_by_point() -> None:
    """Each peer with its node's name, handshake and endpoint; counts by what their rules say."""
    host, applier = held()
    host.handshakes_s[PEER.key] = 7.0
    comment = Point("to-network", "plaintext", "pods").comment("left in clear, strict off")
    host.counts[comment] = (3, 180)
    now = applier.encryption(PLAN)
    assert (now.cluster, now.host, now.at_s, now.device, now.port, now.peer_count) == ("rome", "worker-1", 9.0, "me.0", 51871, 1)
    [peer] = now.peers
    assert (peer.node, peer.link, peer.is_there, peer.handshake_s, peer.public_key) == ("worker-2", "me.0", True, 7.0, PEER.public_key)
    counted = {(point.point, point.state, point.direction, point.traffic): point.packets for point in now.points}
    assert counted.pop(("to-network", "plaintext", "out", "pods")) == 3
    assert counted
    assert not any(counted.values())
    assert PEERS_MAX * 300 < 1 << 20


def test_what_is_not_as_planned_is_seen() -> None:
    """A peer that the device lacks, and one that nobody planned."""
    host, applier = held()
    del host.objects[PEER.key]
    strange = WireguardPeer("me.0", Key("9" * 42 + "A="), None, ())
    host.objects[strange.key] = strange
    now = applier.encryption(PLAN)
    assert {(peer.node, peer.is_there) for peer in now.peers} == {("worker-2", False), ("", True)}


def test_a_host_without_a_part_says_so() -> None:
    """No device, no peers, nothing counted."""
    now = Applier(FakeKernel(FakeHost()), lambda: 9.0).encryption(HostPlan(Name("rome"), Name("gateway"), {}))
    assert (now.device, now.peers, now.points) == ("", (), ())
