"""Pods that leave their cluster through a chosen node: real packets, in every routing, encrypted and not, and what uplinks see of them.

The cluster of examples/egress.yaml; outside is the underlay's router, which knows the way to nodes and to no pod.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.topology import Cluster, EgressPolicy, PublicKey, Topology
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family, Name, Prefix
from services.cli.files import load
from services.cli.lab import namespaces
from services.cli.lab.layout import UNDERLAY, Layout, host_namespace, layout
from services.cli.lab.wiring import Wiring
from services.kernel.curve25519 import new_private_key, public_key
from services.planner.core import Said
from services.planner.state import HostId
from tests.captures import Packet, capture
from tests.hosts import NO_GENEVE, LinuxHost, has_geneve
from tests.meshes import Mesh
from tests.speakers import opened, received
from tests.topologies import EXAMPLES, said

pytestmark = pytest.mark.privileged

PATIENCE_S = 60.0
LATE_S = 0.5
"""Within which a packet arrives that does at all, once the ends have greeted each other."""
WIREGUARD, OVERLAYS = 51871, (4789, 6081)
OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
BANK = Address("198.51.100.7")
OWN = {
    "worker-1": {IPV4: Address("172.18.0.11"), IPV6: Address("2001:db8:18::11")},
    "worker-2": {IPV4: Address("172.18.0.12"), IPV6: Address("2001:db8:18::12")},
    "worker-3": {IPV4: Address("172.18.0.13"), IPV6: Address("2001:db8:18::13")},
}
SHOP = {IPV4: Address("10.200.1.10"), IPV6: Address("fd00:200:0:1::10")}
POST = {IPV4: Address("10.200.3.10"), IPV6: Address("fd00:200:0:3::10")}
SAID = b"seen by nobody between"
INTERVAL_S = 0.01
FORMS: dict[str, dict[str, object]] = {
    "native": {"strict": "enforce"},
    "overlay": {"routing": "overlay", "strict": "enforce"},
    "geneve": {"routing": "overlay", "overlay": "geneve"},
    "native by geneve": {"overlay": "geneve"},
    "native in clear": {"encryption": "none", "strict": "off"},
    "native with nodes": {"strict": "enforce", "wireguard": {"nodes": True}},
}


class Rome:
    """The cluster in network namespaces, and who publishes for it."""

    def __init__(self, folder: Path) -> None:
        self.items = {item.ref: item for item in load([EXAMPLES / "egress.yaml"])}
        self._folder = folder
        self._keys = {HostId("rome", name): new_private_key() for name in OWN}
        self._wiring = Wiring()
        self._number = itertools.count(1)
        self.mesh = Mesh(self._host)

    def make(self) -> None:
        self._wiring.make_underlay()
        self._wiring.turn_into(layout(self.items.values()))
        outside = [*OUTSIDE.values(), BANK]
        routes = ["route add 192.0.2.9 via 172.18.0.13 dev br0 onlink"]
        namespaces.script([*(f"address add {address.host_prefix} dev br0" for address in outside), *routes], UNDERLAY)
        keys: list[Topology] = [
            PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=public_key(key)) for host, key in self._keys.items()
        ]
        self.say(*self.items.values(), *keys)
        self.host("worker-1").run("nft", "\n".join(_masquerading(*each) for each in (("ip", "10.200.0.0/16"), ("ip6", "fd00:200::/48"))))

    def close(self) -> None:
        try:
            for host in self.mesh.hosts.values():
                host.close()
        finally:
            self._wiring.turn_into(Layout({}, {}))
            namespaces.remove([UNDERLAY])

    def say(self, *items: Topology) -> None:
        self.mesh.hear([said(item, next(self._number)) for item in items])
        for item in items:
            assert self.mesh.core.state.objects[item.ref] == item, f"{item.ref} is not admitted"

    def delete(self, item: Topology) -> None:
        tokens = (item.kind.lower(), item.home, item.name)
        self.mesh.hear([Said(tokens, b"", next(self._number))])
        assert item.ref not in self.mesh.core.state.objects

    def turn_to(self, form: str) -> None:
        cluster = self.items["Cluster/rome/rome"]
        assert isinstance(cluster, Cluster)
        changes = dict(FORMS[form])
        if settings := changes.pop("wireguard", None):
            changes["wireguard"] = replace(cluster.wireguard, **settings)  # type: ignore[call-overload]
        self.say(replace(cluster, **changes))

    def policy(self, name: str) -> EgressPolicy:
        item = self.items[f"EgressPolicy/rome/{name}"]
        assert isinstance(item, EgressPolicy)
        return item

    def host(self, name: str) -> LinuxHost:
        return self.mesh.hosts[HostId("rome", name)]

    def _host(self, name: HostId) -> LinuxHost:
        place = self._folder / name.name
        place.mkdir()
        return LinuxHost(host_namespace(*name), place, self._keys[name])


def _masquerading(family: str, pods: str) -> str:
    """What many a CNI does: it takes pods' addresses away from all that leaves the cluster, by whatever link."""
    rule = f"{family} saddr {pods} {family} daddr != {pods} masquerade"
    return f"table {family} cni {{ chain post {{ type nat hook postrouting priority srcnat; {rule}; }}; }}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rome]:
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    found = Rome(tmp_path_factory.mktemp("rome"))
    try:
        found.make()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, made: Rome) -> str:
    """What the cluster is, from now on."""
    name = str(request.param)
    if FORMS[name].get("overlay") == "geneve" and not has_geneve(UNDERLAY):
        pytest.skip(NO_GENEVE)
    made.turn_to(name)
    return name


@pytest.fixture
def rome(made: Rome, form: str) -> Rome:
    return made


async def spoken(place: str, family: Family, to: Address) -> tuple[str, dict[str, list[Packet]]]:
    """Whom the outside hears from when this place says something; what passed all uplinks until the answer was there."""
    with opened(place, family) as client, opened("underlay", family, address=to) as server:
        target = (to, server.getsockname()[1])
        client.sendto(SAID, target)
        await received(server, PATIENCE_S)  # a handshake may come first
        with contextlib.ExitStack() as stack:
            uplinks = {name: stack.enter_context(capture(f"mm.rome.{name}", "eth0")) for name in OWN}
            client.sendto(SAID, target)
            data, sender = await received(server, PATIENCE_S)
            server.sendto(data, sender)
            answer, answered = await received(client, PATIENCE_S)
    assert (answer, answered) == (SAID, target)
    return sender[0], uplinks


def plain(packets: list[Packet]) -> list[tuple[bool, str, str]]:
    """What passed in clear: its direction and ends."""
    return [(packet.outgoing, packet.source, packet.destination) for packet in packets if SAID in packet.body]


@pytest.mark.parametrize("family", FAMILIES)
async def test_pods_leave_through_the_chosen_node(rome: Rome, form: str, family: Family) -> None:
    """Outside sees the exit node's address; the pod's node sends WireGuard alone to it, or the overlay where nothing is encrypted."""
    sender, uplinks = await spoken("rome.pod.shop", family, OUTSIDE[family])
    own, there = OWN["worker-2"][family], OUTSIDE[family]
    assert sender == own
    left = [
        (packet.outgoing, packet.source, packet.destination) for packet in uplinks["worker-2"] if SAID in packet.body[8 : 8 + len(SAID)]
    ]
    assert left == [(True, own, there), (False, there, own)]
    between = {OWN[name][each] for name in ("worker-1", "worker-2") for each in FAMILIES}
    assert not [packet for packet in plain(uplinks["worker-3"]) if packet]
    ports = {packet.destination_port for packet in uplinks["worker-1"] if {packet.source, packet.destination} <= between}
    if "clear" in form:
        assert ports & set(OVERLAYS)
        assert {ends[1:] for ends in plain(uplinks["worker-1"])} == {
            (OWN["worker-1"][IPV4], OWN["worker-2"][IPV4]),
            (OWN["worker-2"][IPV4], OWN["worker-1"][IPV4]),
        }
    else:
        assert plain(uplinks["worker-1"]) == []
        assert ports == {WIREGUARD}


@pytest.mark.parametrize("family", FAMILIES)
async def test_others_leave_as_before(rome: Rome, family: Family) -> None:
    """A pod without a policy leaves through its own node; so does one whose policy is for other destinations."""
    for pod, node in (("post", "worker-3"), ("stock", "worker-2")):
        sender, _ = await spoken(f"rome.pod.{pod}", family, OUTSIDE[family])
        assert sender == OWN[node][family], pod


async def test_a_policy_with_destinations_and_an_address(rome: Rome) -> None:
    """To the bank, the pod leaves through the third node as the address that is led there; that node's own pods do not."""
    assert (await spoken("rome.pod.stock", IPV4, BANK))[0] == "192.0.2.9"
    assert (await spoken("rome.pod.post", IPV4, BANK))[0] == OWN["worker-3"][IPV4]


async def test_pods_of_the_exit_node_itself(rome: Rome) -> None:
    """They leave as the policy's address too, without any overlay."""
    policy = rome.policy("bank")
    rome.say(replace(policy, pods=(*policy.pods, Prefix("10.200.3.0/24"))))
    try:
        assert (await spoken("rome.pod.post", IPV4, BANK))[0] == "192.0.2.9"
    finally:
        rome.say(policy)


@pytest.mark.parametrize("family", FAMILIES)
async def test_inside_stays_inside(rome: Rome, family: Family) -> None:
    """What chosen pods send to other pods, and to nodes, goes there, with the pod's own address."""
    for place, address in (("rome.pod.post", POST[family]), ("rome.worker-3", OWN["worker-3"][family])):
        with opened("rome.pod.shop", family) as client, opened(place, family, address=address) as server:
            client.sendto(SAID, (address, server.getsockname()[1]))
            data, sender = await received(server, PATIENCE_S)
            server.sendto(data, sender)
            assert (await received(client, PATIENCE_S))[0] == SAID
        if "pod" in place:
            assert sender[0] == SHOP[family]


@pytest.mark.parametrize("family", FAMILIES)
async def test_who_reaches_a_pod_by_its_node_is_answered_by_that(rome: Rome, family: Family) -> None:
    """An outsider dials a port of the pod's node: the pod's answer is no flow of its own, and leaves as it came."""
    word, to = ("ip", f"{SHOP[family]}:8080") if family == IPV4 else ("ip6", f"[{SHOP[family]}]:8080")
    chain = f"type nat hook prerouting priority dstnat; {word} daddr {OWN['worker-1'][family]} udp dport 30080 dnat to {to}"
    host = rome.host("worker-1")
    host.run("nft", f"table inet node-ports {{ chain pre {{ {chain}; }}; }}")
    try:
        with opened("underlay", family, address=OUTSIDE[family]) as client, opened("rome.pod.shop", family, port=8080) as server:
            client.sendto(SAID, (OWN["worker-1"][family], 30080))
            data, sender = await received(server, PATIENCE_S)
            assert sender[0] == OUTSIDE[family]
            server.sendto(data, sender)
            assert (await received(client, PATIENCE_S))[1][:2] == (OWN["worker-1"][family], 30080)
    finally:
        host.run("nft", "delete table inet node-ports")


@pytest.mark.parametrize("family", FAMILIES)
def test_long_segments_pass(rome: Rome, family: Family) -> None:
    """A TCP stream fills the overlay's packets in both directions, without one that does not fit."""
    size = 300_000
    with (
        opened("underlay", family, socket.SOCK_STREAM, address=OUTSIDE[family]) as server,
        opened("rome.pod.shop", family, socket.SOCK_STREAM) as client,
    ):
        server.listen()
        for each in (client, server):
            each.settimeout(PATIENCE_S)
        client.connect(server.getsockname()[:2])
        accepted, (source, *_) = server.accept()
        assert source == OWN["worker-2"][family]
        with accepted:
            accepted.settimeout(PATIENCE_S)
            for sender, receiver in ((client, accepted), (accepted, client)):
                thread = threading.Thread(target=sender.sendall, args=(b"x" * size,))
                thread.start()
                got = 0
                while got < size:
                    got += len(receiver.recv(65536))
                thread.join()


def test_without_the_way_nothing_leaves(rome: Rome) -> None:
    """A chosen pod never leaves by its own node: where the way to the exit node is gone, nothing does."""
    host = rome.host("worker-1")
    table = host.run("ip", "-4", "rule", "list", "priority", "903").splitlines()
    numbers = {line.split("lookup ")[1].split()[0] for line in table} - {"7011"}
    lines = {number: host.run("ip", "route", "show", "table", number, "type", "unicast").split() for number in numbers}
    for number, line in lines.items():
        host.run("ip", "route", "del", *line[:1], "table", number, "dev", line[line.index("dev") + 1])
    try:
        with capture("mm.rome.worker-1", "eth0") as uplink, opened("rome.pod.shop") as client:
            for _ in range(5):
                with contextlib.suppress(OSError):
                    client.sendto(SAID, (OUTSIDE[IPV4], 7))
                time.sleep(0.02)
        assert not [packet for packet in uplink if SAID in packet.body or packet.destination == OUTSIDE[IPV4]]
    finally:
        host.restart()
        rome.say(rome.policy("shop"))
        plan = rome.mesh.core.published[HostId("rome", "worker-1")]
        assert host.apply(plan, 10_000).outcome == "applied"


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_forgotten_flow_is_not_begun_by_its_answer(rome: Rome, family: Family) -> None:
    """The pod's node has lost its entry, and the next packet is an answer: the pod's own are led to the exit node all the same."""
    with opened("rome.pod.shop", family) as client, opened("underlay", family, address=OUTSIDE[family]) as server:
        target = (OUTSIDE[family], server.getsockname()[1])
        client.sendto(SAID, target)
        _, sender = await received(server, PATIENCE_S)
        with capture("mm.rome.worker-1", "eth0") as uplink:
            rome.host("worker-1").run("conntrack", "-F")
            server.sendto(b"too late", sender)
            with pytest.raises(TimeoutError):
                await received(client, LATE_S)
            client.sendto(SAID, target)
            assert (await received(server, PATIENCE_S))[1] == sender
            server.sendto(SAID, sender)
            assert (await received(client, PATIENCE_S))[0] == SAID
    assert sender[0] == OWN["worker-2"][family]
    assert not [packet for packet in uplink if OUTSIDE[family] in (packet.source, packet.destination)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exit_node_changes_under_a_stream(rome: Rome, family: Family) -> None:
    """Nothing of a stream is lost: the new node is ready before pods are led there, and the old one lets go last."""
    policy = rome.policy("shop")
    with stream(family) as heard:
        wait_for(lambda: len(heard) > 20)
        rome.say(replace(policy, node=Name("worker-3")))
        seen = len(heard)
        wait_for(lambda: len(heard) > seen + 20)
        middle = list(heard)
        rome.say(policy)
        seen = len(heard)
        wait_for(lambda: len(heard) > seen + 20)
    numbers = [number for number, _ in heard]
    lost = set(range(numbers[0], numbers[-1] + 1)) - set(numbers)
    assert (middle[0][1], middle[-1][1], heard[-1][1]) == (OWN["worker-2"][family], OWN["worker-3"][family], OWN["worker-2"][family])
    assert lost == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_comes_and_goes_under_a_stream(rome: Rome, family: Family) -> None:
    """A flow that was there before is led like a new one, and goes back to its own node's address when the policy is gone."""
    policy = rome.policy("shop")
    rome.delete(policy)
    try:
        with stream(family) as heard:
            for wanted in ("worker-1", "worker-2", "worker-1"):
                if wanted == "worker-2":
                    rome.say(policy)
                elif heard:
                    rome.delete(policy)
                seen = len(heard)
                wait_for(lambda: len(heard) > seen + 20)  # noqa: B023 - it is asked at once
                assert {source for _, source in heard[-10:]} == {OWN[wanted][family]}
    finally:
        rome.say(policy)


@contextlib.contextmanager
def stream(family: Family) -> Iterator[list[tuple[int, str]]]:
    """What the outside hears of a pod that counts, number and source, until the body is left."""
    heard: list[tuple[int, str]] = []
    ended = threading.Event()
    with opened("rome.pod.shop", family) as client, opened("underlay", family, address=OUTSIDE[family]) as server:
        server.settimeout(0.2)
        target = server.getsockname()[:2]

        def say() -> None:
            for number in itertools.count():
                if ended.wait(INTERVAL_S):
                    return
                client.sendto(number.to_bytes(4, "big"), target)

        def hear() -> None:
            while True:
                try:
                    data, sender = server.recvfrom(64)
                except TimeoutError:
                    if ended.is_set():
                        return
                    continue
                heard.append((int.from_bytes(data, "big"), sender[0]))

        threads = [threading.Thread(target=say), threading.Thread(target=hear)]
        for thread in threads:
            thread.start()
        try:
            yield heard
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
