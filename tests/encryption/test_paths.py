"""Every path a packet can take between two nodes, in every mode, both families and over underlays of both: by packets, on the wire.

On the uplink there is nothing but WireGuard's, on the device all is in plain, and both hold for requests and for answers. Here and in an
emulated machine whose kernel has WireGuard and Geneve: see CONTRIBUTING.md. A new path is a line in `PATHS`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest

from schemas.topology import EgressPolicy
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family, Name
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX
from services.planner import mesh as planned
from services.planner import names
from tests.captures import Packet
from tests.encryption import wire
from tests.encryption.conftest import Made
from tests.encryption.site import MODES, MTU, OUTSIDE, Mode, Site
from tests.sites import WAIT_S
from tests.speakers import opened, received

UNDERLAYS = pytest.mark.parametrize("underlay", FAMILIES, ids=["over-ipv4", "over-ipv6"], indirect=True)
pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240), UNDERLAYS]

SERVICE = {IPV4: Address("10.96.0.10"), IPV6: Address("fd00:96::10")}
"""An address that a table of somebody else translates to a pod of worker-2, as kube-proxy does for a service."""
PROBE = 3  # IP_PMTUDISC_PROBE, IPV6_PMTUDISC_PROBE: never in pieces, whatever was learned before
OPTIONS = {IPV4: (socket.IPPROTO_IP, 10, 11), IPV6: (socket.IPPROTO_IPV6, 23, 25)}
"""The level, MTU_DISCOVER and RECVERR of linux/in.h and linux/in6.h."""
IPV6_DONTFRAG = 62
LLDP = b"\x88\xcc"
SHORT_S = 10.0
HEADERS_BYTES = {IPV4: 28, IPV6: 48}
TOO_BIG = {IPV4: (2, 3, 4), IPV6: (3, 2, 0)}
"""Origin, type and code of what says so: SO_EE_ORIGIN_ICMP and _ICMP6 of linux/errqueue.h, RFC 792 and RFC 4443."""


def pod(site: Site, family: Family) -> Address:
    return site.pod("stock", family)


def roaming(site: Site, family: Family) -> Address:
    return site.pod("roam", family)


def service(_: Site, family: Family) -> Address:
    return SERVICE[family]


def node(site: Site, _: Family) -> Address:
    return site.address("worker-2")


def outside(site: Site, _: Family) -> Address:
    return OUTSIDE[site.underlay]


class Path(NamedTuple):
    """Who speaks to whom, and what it dials. `of_nodes`: encrypted only where nodes' packets are; `of_underlay`: in its family alone.

    `leaves`: by worker-2, through which a policy leads it out of the cluster.
    """

    client: str
    server: str
    dial: Callable[[Site, Family], Address]
    of_nodes: bool = False
    of_underlay: bool = False
    leaves: bool = False

    @property
    def families(self) -> tuple[Family | None, ...]:
        """None stands for the underlay's."""
        return (None,) if self.of_underlay else FAMILIES


PATHS = {
    "pod-to-pod": Path("rome.pod.shop", "rome.pod.stock", pod),
    "pod-to-roaming-pod": Path("rome.pod.shop", "rome.pod.roam", roaming),
    "node-to-pod": Path("rome.worker-1", "rome.pod.stock", pod),
    "pod-to-service": Path("rome.pod.shop", "rome.pod.stock", service),
    "node-to-service": Path("rome.worker-1", "rome.pod.stock", service, of_underlay=True),
    "node-to-node": Path("rome.worker-1", "rome.worker-2", node, of_nodes=True, of_underlay=True),
    "pod-to-node": Path("rome.pod.shop", "rome.worker-2", node, of_nodes=True, of_underlay=True),
    "pod-to-outside": Path("rome.pod.shop", "underlay", outside, of_underlay=True, leaves=True),
}
WAYS = [
    pytest.param(mode, family, path, id=f"{mode}-{path}{f'-ipv{family}' if family else ''}")
    for mode in MODES
    for path, asked in PATHS.items()
    for family in asked.families
    if mode.nodes or not asked.of_nodes
]
EACH = pytest.mark.parametrize(
    "mode, family", [pytest.param(*case, id=f"{case[0]}-ipv{case[1]}") for case in itertools.product(MODES, FAMILIES)]
)


@pytest.fixture(autouse=True)
def services(site: Site) -> Iterator[None]:
    """On worker-1, a table of somebody else that leads a service's address to a pod of worker-2."""
    rules = "; ".join(
        f"{word} daddr {SERVICE[family]} dnat {word} to {site.pod('stock', family)}" for word, family in (("ip", IPV4), ("ip6", IPV6))
    )
    chains = (f"chain {hook} {{ type nat hook {hook} priority -100; {rules}; }};" for hook in ("prerouting", "output"))
    site.run("rome.worker-1", "nft", f"table inet services {{ {' '.join(chains)} }}")
    try:
        yield
    finally:
        site.run("rome.worker-1", "nft", "delete", "table", "inet", "services")


@pytest.mark.parametrize("mode, family, path", WAYS)
async def test_on_the_wire_there_is_wireguard_alone(
    turned: Made, mode: Mode, family: Family | None, path: str, record_property: Callable[[str, object], None]
) -> None:
    """Requests and answers pass both devices in plain, and both uplinks inside WireGuard only; strict mode has counted nothing."""
    site = turned(mode)
    await goes_inside(site, mode, PATHS[path], family or site.underlay)
    record_property("mode", str(mode))
    record_property("path", f"{path} {mode} {family or site.underlay} over {site.underlay}")


async def goes_inside(site: Site, mode: Mode, asked: Path, family: Family) -> None:
    """Fails unless what is said on a path goes by WireGuard and no other way."""
    dial = asked.dial(site, family)
    with led_out(site, asked), wire.watched() as seen:
        talk = await wire.talk(asked.client, asked.server, dial, family, address=dial if asked.leaves else "")
        assert await wire.greets(asked.client, asked.server, dial, family)
    assert not asked.leaves or talk.sender == site.address("worker-2")
    here, there = seen.devices
    assert wire.says(here, talk.request, outgoing=True)
    assert wire.says(there, talk.request, outgoing=False)
    assert wire.says(there, talk.answer, outgoing=True)
    assert wire.says(here, talk.answer, outgoing=False)
    for name, uplink in zip(wire.NODES, map(partial(on_the_way, site, asked), seen.uplinks), strict=True):
        words = (talk.request, talk.answer)
        assert not [(name, said) for said in words for out in (True, False) if wire.says(uplink, said, outgoing=out)]
        assert wire.encrypted(uplink, outgoing=True) > 2
        assert wire.encrypted(uplink, outgoing=False) > 2
        assert wire.in_clear(uplink, site.cluster()) == []
        if mode.nodes:
            assert wire.strangers(uplink) == []
    assert [count for name in wire.NODES for count in wire.counted(site, name).values() if count] == []


@contextlib.contextmanager
def led_out(site: Site, asked: Path) -> Iterator[None]:
    """While the body runs, a policy leads out of the cluster what is to leave it."""
    if not asked.leaves:
        yield
        return
    pods = tuple(prefix for prefix in site.node("worker-1").pod_prefixes if prefix.family == site.underlay)
    policy = EgressPolicy(name=Name("shop"), cluster=Name("rome"), pods=pods, node=Name("worker-2"))
    site.say([policy])
    try:
        yield
    finally:
        site.forget(policy.ref)


def on_the_way(site: Site, asked: Path, uplink: list[Packet]) -> list[Packet]:
    """What an uplink shows, but for what has left the cluster: that is in clear, and the exit node's."""
    if not asked.leaves:
        return uplink
    own, out = site.address("worker-2"), OUTSIDE[site.underlay]
    return [packet for packet in uplink if {packet.source, packet.destination} != {own, out}]


@EACH
async def test_pods_see_each_other_and_nodes_under_their_own_addresses(turned: Made, mode: Mode, family: Family) -> None:
    """Nothing is translated between pods; a node speaks as the address that its peers take from it."""
    site = turned(mode)
    dial = site.pod("stock", family)
    assert (await wire.talk("rome.pod.shop", "rome.pod.stock", dial, family)).sender == site.pod("shop", family)
    assert (await wire.talk("rome.worker-1", "rome.pod.stock", dial, family)).sender == site.sender("worker-1", family)


@pytest.mark.parametrize("mode, family, path", [way for way in WAYS if way.values[-1] in ("pod-to-pod", "node-to-pod", "pod-to-outside")])
async def test_a_packet_of_the_mtu_passes_and_one_byte_more_does_not(turned: Made, mode: Mode, family: Family | None, path: str) -> None:
    """In one piece, inside and outside. A pod is told by the right ICMP error, with the MTU in it, a node by its own kernel.

    To a node through which pods leave, packets go by an overlay in any mode.
    """
    site, asked = turned(mode), PATHS[path]
    family = family or site.underlay
    mtu, dial = (Mode("vxlan") if asked.leaves and mode.is_native else mode).mtu(site.underlay), asked.dial(site, family)
    address = dial if asked.leaves else ""
    with led_out(site, asked):
        await wire.talk(asked.client, asked.server, dial, family, address=address)  # neighbours and sessions are there
        with wire.watched() as seen, whole(asked.client, family) as here, opened(asked.server, family, address=address) as there:
            to = (dial, there.getsockname()[1])
            fitting, larger = (bytes(mtu - HEADERS_BYTES[family] + more) for more in (0, 1))
            here.sendto(fitting, to)
            assert len((await received(there, WAIT_S))[0]) == len(fitting)
            if asked.client == "rome.worker-1":
                with pytest.raises(OSError, match="too long"):
                    here.sendto(larger, to)
            else:
                here.sendto(larger, to)
                assert await told(here) == (errno.EMSGSIZE, *TOO_BIG[family], mtu)
            with pytest.raises(TimeoutError):
                await received(there, 0.2)
    for uplink in (on_the_way(site, asked, found) for found in seen.uplinks):
        assert wire.strangers(uplink) == []
        assert max(len(packet.body) for packet in uplink) <= MTU - (20 if site.underlay == IPV4 else 40)


@pytest.mark.parametrize("mode", [Mode("vxlan"), Mode("geneve"), Mode("vxlan", nodes=True)], ids=str)
async def test_a_frame_that_is_no_ip_is_encrypted_too(turned: Made, mode: Mode) -> None:
    """Rules see none of what some daemon says by an overlay's link about the host, and its outer packet is encrypted like any."""
    site, words = turned(mode), secrets.token_bytes(24)
    await wire.talk("rome.worker-1", "rome.pod.stock", site.pod("stock", IPV4), IPV4)
    link = names.mesh_link_to("worker-2") if mode.way == "geneve" else names.mesh_link(site.underlay)
    with wire.watched() as seen, sender_of_frames("rome.worker-1", link) as here:
        far = bytes.fromhex(planned.mac(site.chosen.numbers["rome", "worker-2"]).replace(":", ""))
        here.send(far + here.getsockname()[4] + LLDP + words)
        await wire.eventually(lambda: wire.says(seen.devices[1], words, outgoing=False), SHORT_S)
    assert wire.in_clear(seen.uplinks[0], site.cluster()) == []


@contextlib.contextmanager
def sender_of_frames(place: str, link: str) -> Iterator[socket.socket]:
    """A socket that sends frames by a link, past all rules."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        made.bind((link, 0))
        return made

    with namespaces.inside(f"{PREFIX}{place}", make) as made:
        yield made


@contextlib.contextmanager
def whole(client: str, family: Family) -> Iterator[socket.socket]:
    """A socket whose packets nobody may cut, and that hears of errors."""
    level, discover, errors = OPTIONS[family]
    with opened(client, family) as made:
        made.setsockopt(level, discover, PROBE)
        made.setsockopt(level, errors, 1)
        if family != IPV4:
            made.setsockopt(level, IPV6_DONTFRAG, 1)
        yield made


async def told(at: socket.socket) -> tuple[int, ...]:
    """What an ICMP error says: errno, origin, type, code and information (struct sock_extended_err of linux/errqueue.h)."""
    (data, *_) = await wire.eventually(lambda: at.recvmsg(2048, 512, socket.MSG_ERRQUEUE)[1])
    number, origin, kind, code, _, info, _ = struct.unpack("=IBBBBII", data[2][:16])
    return number, origin, kind, code, info
