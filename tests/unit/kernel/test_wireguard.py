"""WireGuard as values: keys, UAPI text, netlink attributes, and what a peer has to be told."""

from __future__ import annotations

import base64
import errno
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pyroute2.netlink.generic.wireguard import wgmsg

from schemas.host_objects import OWN_ALIAS, WireguardPeer
from schemas.values import Endpoint, Key, Prefix
from services.kernel import uapi
from services.kernel.curve25519 import clamped, multiply, new_private_key, public_key
from services.kernel.links import Device
from services.kernel.peers import held_peers, peer_changes, sorted_prefixes
from services.kernel.pyroute import Message
from services.kernel.transaction import Change, Listed
from services.kernel.uapi import Userspace, decode_device, encode_changes
from services.kernel.wireguard import Wireguard
from services.kernel.wireguard_device import DeviceState, PeerChange, PeerState, Settings
from services.kernel.wireguard_kernel import decode_device as decode_netlink
from services.kernel.wireguard_kernel import encode_changes as encode_netlink
from services.kernel.wireguard_key import KeyFiles, raw_key
from services.runtime.errors import Transient

KEY = public_key(bytes(range(32)))
PEER = WireguardPeer("mt.0", Key(KEY), Endpoint("192.0.2.1:51840"), (Prefix("10.1.0.0/16"),), 25)
HELD = PeerState(PEER.endpoint, frozenset(PEER.allowed_ips), 25)


@pytest.mark.parametrize(
    "scalar,point,product",
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_x25519_gives_the_products_of_rfc_7748(scalar: str, point: str, product: str) -> None:
    """The two test vectors of section 5.2."""
    assert multiply(bytes.fromhex(scalar), bytes.fromhex(point)).hex() == product


def test_a_public_key_is_the_product_with_the_base_point() -> None:
    """The iterated vector of section 5.2 after one step: the scalar 9 times the base point 9."""
    private = (9).to_bytes(32, "little")
    assert base64.b64decode(public_key(private)).hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"


def test_x25519_iterated_a_thousand_times() -> None:
    """The iterated vector of section 5.2."""
    scalar = point = (9).to_bytes(32, "little")
    for _ in range(1000):
        scalar, point = multiply(scalar, point), scalar
    assert scalar.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


def test_a_new_private_key_is_clamped_and_new() -> None:
    one, two = new_private_key(), new_private_key()
    assert one != two
    assert one == clamped(one)


def test_uapi_is_told_what_comes_and_nothing_is_replaced() -> None:
    """One peer's change is told in full text, and no other peer is mentioned."""
    step = PeerChange(raw_key(KEY), endpoint="192.0.2.1:51840", allowed_ips=frozenset({"10.2.0.0/16", "10.1.0.0/16"}), keepalive_seconds=0)
    text = encode_changes(Settings(listen_port=51840, fwmark=0), (step, PeerChange(bytes(32), remove=True)))
    assert text.splitlines() == [
        "set=1",
        "listen_port=51840",
        "fwmark=0",
        f"public_key={raw_key(KEY).hex()}",
        "endpoint=192.0.2.1:51840",
        "persistent_keepalive_interval=0",
        "allowed_ip=10.1.0.0/16",
        "allowed_ip=10.2.0.0/16",
        f"public_key={'00' * 32}",
        "remove=true",
        "",
    ]


def test_uapi_answers_are_decoded() -> None:
    answer = (
        f"private_key={'01' * 32}\nlisten_port=51840\nfwmark=77\npublic_key={'02' * 32}\nendpoint=192.0.2.1:7\nallowed_ip=10.1.0.0/16\n"
        f"last_handshake_time_sec=100\nlast_handshake_time_nsec=500000000\npersistent_keepalive_interval=25\n"
        f"rx_bytes=7\ntx_bytes=9\n"
        f"public_key={'03' * 32}\nprotocol_version=1\nerrno=0\n\n"
    )
    device = decode_device(answer)
    assert (device.private_key, device.listen_port, device.fwmark) == (b"\1" * 32, 51840, 77)
    assert device.peers == {b"\2" * 32: PeerState("192.0.2.1:7", frozenset({"10.1.0.0/16"}), 25, 100.5, 7, 9), b"\3" * 32: PeerState()}


def test_a_device_without_a_key_has_none() -> None:
    assert decode_device(f"private_key={'00' * 32}\nerrno=0\n\n").private_key == b""


def library_reads(body: bytes) -> Message:
    """A message of ours as pyroute2 understands it, which knows the same header file."""
    received = wgmsg((16 + len(body)).to_bytes(4, "little") + b"\0" * 12 + body)
    received.decode()
    return Message(received)


def test_netlink_is_told_what_the_library_would_tell() -> None:
    """A device's settings, a peer of each family with its endpoint and AllowedIPs, and one that goes, as another reader sees them."""
    four = PeerChange(b"\2" * 32, endpoint="192.0.2.1:51840", allowed_ips=frozenset({"10.1.0.0/16", "::/0"}), keepalive_seconds=25)
    six = PeerChange(b"\3" * 32, endpoint="[2001:db8::7]:51841", keepalive_seconds=0)
    device, peers = encode_netlink("mt.0", Settings(b"\1" * 32, 51840, 0x4D00), (four, six, PeerChange(b"\4" * 32, remove=True)))
    read = library_reads(device)
    assert read.text("WGDEVICE_A_IFNAME") == "mt.0"
    assert base64.b64decode(read.text("WGDEVICE_A_PRIVATE_KEY")) == b"\1" * 32
    assert (read.number("WGDEVICE_A_LISTEN_PORT"), read.number("WGDEVICE_A_FWMARK")) == (51840, 0x4D00)
    first, second, third = library_reads(peers).inners("WGDEVICE_A_PEERS")
    assert [base64.b64decode(peer.text("WGPEER_A_PUBLIC_KEY"))[0] for peer in (first, second, third)] == [2, 3, 4]
    assert [peer.number("WGPEER_A_FLAGS") for peer in (first, second, third)] == [0, 0, 1]
    assert [(end["addr"], end["port"]) for peer in (first, second) if (end := peer.record("WGPEER_A_ENDPOINT"))] == [
        ("192.0.2.1", 51840),
        ("2001:db8::7", 51841),
    ]
    assert first.number("WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL") == 25
    assert {member.field_text("addr") for member in first.inners("WGPEER_A_ALLOWEDIPS")} == {"10.1.0.0/16", "::/0"}


def test_netlink_tells_many_peers_in_few_messages() -> None:
    """A thousand peers fit into some messages, none too large for its parts; a peer with many AllowedIPs goes on in another part."""
    many = frozenset(f"10.{number // 256}.{number % 256}.0/24" for number in range(1200))
    peers = [PeerChange(number.to_bytes(32, "big"), allowed_ips=frozenset({f"10.9.{number % 256}.0/32"})) for number in range(1, 1001)]
    bodies = list(encode_netlink("mt.0", Settings(), [PeerChange(raw_key(KEY), allowed_ips=many), *peers]))
    assert len(bodies) < 10
    assert all(len(body) < 33 << 10 for body in bodies)
    found = decode_netlink(bodies).peers
    assert found[raw_key(KEY)].allowed_ips == many
    assert len(found) == 1001


def test_netlink_devices_are_decoded() -> None:
    """What the kernel dumps is what it was told, over however many messages."""
    told = (
        PeerChange(b"\2" * 32, endpoint="192.0.2.1:51840", keepalive_seconds=25),
        PeerChange(b"\3" * 32, endpoint="[2001:db8::7]:51840", allowed_ips=frozenset({"::/0", "0.0.0.0/0", "fd00:200::/48"})),
    )
    device = decode_netlink(encode_netlink("mt.0", Settings(b"\1" * 32, 51840, 77), told))
    assert (device.private_key, device.listen_port, device.fwmark) == (b"\1" * 32, 51840, 77)
    assert device.peers == {
        b"\2" * 32: PeerState("192.0.2.1:51840", frozenset(), 25),
        b"\3" * 32: PeerState("[2001:db8::7]:51840", frozenset({"::/0", "0.0.0.0/0", "fd00:200::/48"})),
    }
    assert decode_netlink(encode_netlink("mt.0", Settings(bytes(32)), ())).private_key == b""


def device(*peers: tuple[WireguardPeer | str, PeerState]) -> DeviceState:
    """A device that holds these peers."""
    return DeviceState(b"", b"", 0, {raw_key(item if isinstance(item, str) else item.public_key): state for item, state in peers})


def test_a_held_peer_is_told_nothing() -> None:
    assert peer_changes([Change(None, PEER)], device((PEER, HELD)), 0.0) == []
    assert peer_changes([Change(PEER, None)], device(), 0.0) == []


def test_a_learned_endpoint_is_kept_until_the_plan_moves() -> None:
    """Repairing another field leaves the endpoint alone while it works; a new endpoint in the plan is written."""
    learned = device((PEER, PeerState("203.0.113.9:1", HELD.allowed_ips, 0, handshake_s=1000.0)))
    assert peer_changes([Change(PEER, PEER)], learned, 1001.0) == [PeerChange(raw_key(KEY), keepalive_seconds=25)]
    assert peer_changes([Change(replace(PEER, endpoint=None), PEER)], learned, 1001.0) == [PeerChange(raw_key(KEY), keepalive_seconds=25)]
    moved = replace(PEER, endpoint=Endpoint("192.0.2.9:1"))
    expected = PeerChange(raw_key(KEY), endpoint="192.0.2.9:1", keepalive_seconds=25)
    assert peer_changes([Change(PEER, moved)], learned, 1001.0) == [expected]
    assert peer_changes([Change(moved, moved)], learned, 1181.0) == [expected]


def test_an_endpoint_that_nobody_plans_is_the_devices() -> None:
    """Whatever it learned, and however old that is, there is nothing to tell and no difference."""
    wanted = replace(PEER, endpoint=None)
    for endpoint in ("", "203.0.113.7:40001", "203.0.113.8:51111"):
        held = device((PEER, PeerState(endpoint, HELD.allowed_ips, 25, handshake_s=1000.0)))
        assert held_peers("mt.0", held, {PEER.key: wanted}, 1e6) == {PEER.key: wanted}
        assert peer_changes([Change(wanted, wanted)], held, 1e6) == []
    assert peer_changes([Change(PEER, wanted)], device((PEER, HELD)), 0.0) == []


OTHER = replace(PEER, public_key=Key(public_key(b"\2" * 32)), allowed_ips=(Prefix("10.2.0.0/16"), Prefix("10.3.0.0/16")))


def test_a_prefix_moves_by_being_added_where_it_goes() -> None:
    """The one that had it loses it by that; nothing is replaced, and nothing is taken away."""
    here, there = replace(OTHER, allowed_ips=OTHER.allowed_ips[:1]), replace(PEER, allowed_ips=(*PEER.allowed_ips, OTHER.allowed_ips[1]))
    held = device((PEER, HELD), (OTHER, replace(HELD, allowed_ips=frozenset(OTHER.allowed_ips))))
    assert peer_changes([Change(OTHER, here), Change(PEER, there)], held, 0.0) == [
        PeerChange(raw_key(KEY), allowed_ips=frozenset({"10.3.0.0/16"}))
    ]


def test_what_goes_nowhere_leaves_by_a_peer_that_is_removed() -> None:
    """After all that comes; removed peers are the last."""
    held = device((PEER, HELD), (OTHER, replace(HELD, allowed_ips=frozenset(OTHER.allowed_ips))))
    more = replace(PEER, allowed_ips=(*PEER.allowed_ips, Prefix("10.9.0.0/16")))
    assert peer_changes([Change(OTHER, None), Change(PEER, more)], held, 0.0) == [
        PeerChange(raw_key(KEY), allowed_ips=frozenset({"10.9.0.0/16"})),
        PeerChange(raw_key(OTHER.public_key), remove=True),
    ]
    less = replace(OTHER, allowed_ips=OTHER.allowed_ips[:1])
    assert peer_changes([Change(OTHER, less), Change(PEER, more)], held, 0.0) == [
        PeerChange(raw_key(KEY), allowed_ips=frozenset({"10.9.0.0/16"})),
        PeerChange(bytes(32), allowed_ips=frozenset({"10.3.0.0/16"})),
        PeerChange(bytes(32), remove=True),
    ]


def test_a_theft_is_a_difference_of_the_robbed_peer_alone() -> None:
    """What was taken from it by hand is named with the thief, who is as planned apart from that."""
    held = device(
        (PEER, replace(HELD, allowed_ips=frozenset())), (OTHER, replace(HELD, allowed_ips=frozenset({*OTHER.allowed_ips, "10.1.0.0/16"})))
    )
    wanted = {item.key: item for item in (PEER, OTHER)}
    found = held_peers("mt.0", held, wanted, 0.0)
    assert found == {
        PEER.key: Listed("wireguard", PEER.key, f"10.1.0.0/16 is at peer {OTHER.public_key} instead"),
        OTHER.key: replace(OTHER, endpoint=PEER.endpoint),
    }
    assert peer_changes([Change(found[PEER.key], PEER)], held, 0.0) == [PeerChange(raw_key(KEY), allowed_ips=frozenset({"10.1.0.0/16"}))]
    unplanned = held_peers("mt.0", held, {PEER.key: PEER}, 0.0)
    assert "10.1.0.0/16" in unplanned[OTHER.key].allowed_ips  # type: ignore[union-attr]


@pytest.mark.parametrize("age_s,endpoint", [(179.0, "192.0.2.1:51840"), (181.0, "203.0.113.9:1")])
def test_a_fresh_handshake_excuses_the_endpoint(age_s: float, endpoint: str) -> None:
    """Up to three minutes after a handshake, what the device learned counts as what is wanted."""
    held = device((PEER, PeerState("203.0.113.9:1", HELD.allowed_ips, 25, handshake_s=1000.0)))
    assert held_peers("mt.0", held, {PEER.key: PEER}, 1000.0 + age_s) == {PEER.key: replace(PEER, endpoint=Endpoint(endpoint))}


def test_prefixes_are_ordered_by_address() -> None:
    assert sorted_prefixes(frozenset({"10.10.0.0/16", "10.9.0.0/16", "fd00::/8", "10.9.0.0/24"})) == (
        "10.9.0.0/16",
        "10.9.0.0/24",
        "10.10.0.0/16",
        "fd00::/8",
    )


def test_keys_are_base64_of_32_bytes() -> None:
    assert len(base64.b64decode(KEY)) == 32


def test_what_ends_wireguard_go_as_it_starts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that starts, resets whoever asks, and tells nobody why, the cause that can be known is named."""

    def reset(name: str, request: str) -> str:
        raise OSError(errno.ECONNRESET, f"{name}: {request.strip()}")

    monkeypatch.setattr(Userspace, "_talk", staticmethod(reset))
    monkeypatch.setattr(uapi, "_START_S", 0.05)
    monkeypatch.setattr(uapi, "_PROGRAM", "true")
    monkeypatch.setattr(uapi, "_inotify_is_used_up", lambda: True)
    with pytest.raises(OSError, match=r"fs\.inotify\.max_user_instances"):
        Userspace(lambda _: True).create("mt.0")
    monkeypatch.setattr(uapi, "_inotify_is_used_up", lambda: False)
    with pytest.raises(OSError, match=r"did not appear within 0\.05 s$"):
        Userspace(lambda _: True).create("mt.0")


class StubLinks:
    """Links of which some are there."""

    def __init__(self, *names: str) -> None:
        self.there = names

    def device(self, name: str) -> Device | None:
        return Device(1, name, "tun", OWN_ALIAS, True, 1420) if name in self.there else None


class Silent:
    """A WireGuard device whose socket is not to be seen."""

    def get(self, name: str) -> DeviceState:
        raise FileNotFoundError(errno.ENOENT, "no such socket", name)


@pytest.mark.parametrize("folder,is_there,unreadable", [(None, True, True), (None, False, False), (Path("/nowhere"), True, False)])
def test_a_device_that_does_not_answer_who_only_looks_is_unreadable(folder: Path | None, is_there: bool, unreadable: bool) -> None:
    """It may answer others: its peers are unknown then, and not missing. One that has gone meanwhile is gone."""
    device = Device(1, "mt.0", "tun", OWN_ALIAS, True, 1420)
    links: Any = StubLinks(*["mt.0"][: int(is_there)])
    implementation: Any = Silent()
    wireguard = Wireguard(links, KeyFiles(folder), {"tun": implementation}, "tun")
    if unreadable:
        with pytest.raises(Transient, match=r"mt\.0: it does not answer"):
            wireguard.read({"mt.0": device}, ("wireguard",), {}, 0.0)
    else:
        assert wireguard.read({"mt.0": device}, ("wireguard",), {}, 0.0) == {}
