"""WireGuard as values: keys, UAPI text, netlink attributes, and what a peer has to be told."""

from __future__ import annotations

import base64
import errno

import pytest
from msgspec.structs import replace
from pyroute2.netlink.generic.wireguard import AsyncWireGuard, wgmsg

from schemas.host_objects import WireguardPeer
from schemas.values import Endpoint, Key, Prefix
from services.kernel import uapi
from services.kernel.curve25519 import clamped, multiply, new_private_key, public_key
from services.kernel.pyroute import Message
from services.kernel.transaction import Change
from services.kernel.uapi import Userspace, decode_device, encode_changes
from services.kernel.wireguard import held_peer, peer_change, raw_key, sorted_prefixes
from services.kernel.wireguard_device import PeerChange, PeerState, Settings
from services.kernel.wireguard_kernel import decode_device as decode_netlink
from services.kernel.wireguard_kernel import peer_messages

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


def test_uapi_never_replaces_peers() -> None:
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
        "replace_allowed_ips=true",
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
        f"public_key={'03' * 32}\nprotocol_version=1\nerrno=0\n\n"
    )
    device = decode_device(answer)
    assert (device.private_key, device.listen_port, device.fwmark) == (b"\1" * 32, 51840, 77)
    assert device.peers == {b"\2" * 32: PeerState("192.0.2.1:7", frozenset({"10.1.0.0/16"}), 25, 100.5), b"\3" * 32: PeerState()}


def test_a_device_without_a_key_has_none() -> None:
    assert decode_device(f"private_key={'00' * 32}\nerrno=0\n\n").private_key == b""


def over_the_wire(part: dict[str, object], *attributes: list[object]) -> Message:
    """A change of one peer as bytes, and read again as if the kernel had sent it."""
    sent = wgmsg()
    sent["attrs"] += attributes
    AsyncWireGuard()._wg_set_peer(sent, part)
    sent.encode()
    received = wgmsg(sent.data)
    received.decode()
    return Message(received)


def test_netlink_peers_go_over_several_messages() -> None:
    """A peer with many AllowedIPs replaces with the first message and adds with the others."""
    many = frozenset(f"10.{number // 256}.{number % 256}.0/24" for number in range(1200))
    parts = peer_messages(PeerChange(raw_key(KEY), allowed_ips=many))
    assert [part.get("replace_allowed_ips", False) for part in parts] == [True, False, False]
    assert decode_netlink([over_the_wire(part) for part in parts]).peers[raw_key(KEY)].allowed_ips == many


def test_netlink_devices_are_decoded() -> None:
    endpoint, private = "192.0.2.1:51840", base64.b64encode(b"\1" * 32)
    head = (["WGDEVICE_A_PRIVATE_KEY", private], ["WGDEVICE_A_LISTEN_PORT", 51840], ["WGDEVICE_A_FWMARK", 77])
    [part] = peer_messages(PeerChange(b"\2" * 32, endpoint=endpoint, keepalive_seconds=25))
    device = decode_netlink([over_the_wire(part, *head)])
    assert (device.private_key, device.listen_port, device.fwmark) == (b"\1" * 32, 51840, 77)
    assert device.peers == {b"\2" * 32: PeerState(endpoint, frozenset(), 25, 0.0)}


def test_netlink_peers_are_of_either_family() -> None:
    """An endpoint and AllowedIPs of IPv6, and of both, over the wire and back."""
    endpoint, allowed = "[2001:db8::7]:51840", frozenset({"::/0", "0.0.0.0/0", "fd00:200::/48"})
    [part] = peer_messages(PeerChange(b"\2" * 32, endpoint=endpoint, allowed_ips=allowed))
    assert decode_netlink([over_the_wire(part)]).peers == {b"\2" * 32: PeerState(endpoint, allowed, 0, 0.0)}


def test_a_held_peer_is_told_nothing() -> None:
    assert peer_change(Change(None, PEER), HELD) is None
    assert peer_change(Change(PEER, None), None) is None


def test_a_learned_endpoint_is_kept_until_the_plan_moves() -> None:
    """Repairing another field leaves the endpoint alone; a new endpoint in the plan is written."""
    learned = PeerState("203.0.113.9:1", HELD.allowed_ips, 0)
    assert peer_change(Change(PEER, PEER), learned) == PeerChange(raw_key(KEY), keepalive_seconds=25)
    moved = WireguardPeer("mt.0", PEER.public_key, Endpoint("192.0.2.9:1"), PEER.allowed_ips, 25)
    assert peer_change(Change(PEER, moved), learned) == PeerChange(raw_key(KEY), endpoint="192.0.2.9:1", keepalive_seconds=25)


def test_an_endpoint_that_nobody_plans_is_the_devices() -> None:
    """Whatever it learned, and however old that is, there is nothing to tell and no difference."""
    wanted = replace(PEER, endpoint=None)
    for endpoint in ("", "203.0.113.7:40001", "203.0.113.8:51111"):
        state = PeerState(endpoint, HELD.allowed_ips, 25, handshake_s=1000.0)
        assert held_peer("mt.0", raw_key(KEY), state, {PEER.key: wanted}, 1e6) == wanted
        assert peer_change(Change(wanted, wanted), state) is None
    assert peer_change(Change(PEER, wanted), HELD) is None


@pytest.mark.parametrize("age_s,endpoint", [(179.0, "192.0.2.1:51840"), (181.0, "203.0.113.9:1")])
def test_a_fresh_handshake_excuses_the_endpoint(age_s: float, endpoint: str) -> None:
    """Up to three minutes after a handshake, what the device learned counts as what is wanted."""
    state = PeerState("203.0.113.9:1", HELD.allowed_ips, 25, handshake_s=1000.0)
    assert held_peer("mt.0", raw_key(KEY), state, {PEER.key: PEER}, 1000.0 + age_s).endpoint == endpoint


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
