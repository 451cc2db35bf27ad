"""The auditor on a real kernel, beside an applier: what a hand changes in any layer is one event, repaired and resolved."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from schemas.topology import DriftPolicy
from services.auditor.causes import FALLEN
from services.kernel.curve25519 import public_key
from tests.contract.kernel.gateway_plan import PEERS
from tests.integration.auditor.conftest import QUIET_S, Watched

pytestmark = pytest.mark.privileged

Audited = Callable[..., None]
STRANGER = public_key(bytes([9]) * 32)
REST = "10.9.0.0/16,10.8.1.0/24,10.8.0.0/32"
"""What the second peer of the first tunnel is allowed."""


class Hand(NamedTuple):
    """Commands, and the key and layer of the one event that they lead to."""

    commands: str
    key: str
    layer: str


HANDS = {
    "overlay link deleted": Hand("ip link del {o}1", "link {o}1", "link"),
    "IPv6 overlay link deleted": Hand("ip link del {o}6", "link {o}6", "link"),
    "tunnel deleted": Hand("ip link del {t}0", "link {t}0", "link"),
    "link down": Hand("ip link set {o}1 down", "link {o}1", "link"),
    "tunnel down": Hand("ip link set {t}1 down", "link {t}1", "link"),
    "flap": Hand("ip link set {o}1 down; ip link set {o}1 up", "link {o}1", "link"),
    "flap with IPv6": Hand("ip link set {o}6 down; ip link set {o}6 up", "link {o}6", "link"),
    "flap of a tunnel": Hand("ip link set {t}0 down; ip link set {t}0 up", "link {t}0", "link"),
    "MTU": Hand("ip link set {o}1 mtu 1300", "link {o}1", "link"),
    "MTU of a tunnel": Hand("ip link set {t}0 mtu 1300", "link {t}0", "link"),
    "MTU too small for IPv6": Hand("ip link set {o}6 mtu 1200", "link {o}6", "link"),
    "MAC": Hand("ip link set {o}1 address 02:00:00:00:00:77", "link {o}1", "link"),
    "another link of our alias": Hand("ip link add mo.x type bridge; ip link set mo.x alias meshmark up", "link mo.x", "link"),
    "address removed": Hand("ip addr del 10.80.2.1/32 dev {o}1", "address {o}1 10.80.2.1/32", "address"),
    "IPv6 address removed": Hand("ip addr del fd00:80::1/128 dev {o}6", "address {o}6 fd00:80::1/128", "address"),
    "last address of a tunnel removed": Hand("ip addr del 169.254.18.1/30 dev {t}0", "address {t}0 169.254.18.1/30", "address"),
    "address added to a link of ours": Hand("ip addr add 10.4.4.4/32 dev {o}1", "address {o}1 10.4.4.4/32", "address"),
    "peer removed": Hand(f"wg set {{t}}0 peer {PEERS[2]} remove", f"peer {{t}}0 {PEERS[2]}", "wireguard"),
    "AllowedIP moved": Hand(f"wg set {{t}}0 peer {PEERS[2]} allowed-ips {REST},0.0.0.0/0", f"peer {{t}}0 {PEERS[0]}", "wireguard"),
    "AllowedIP taken by a stranger": Hand(f"wg set {{t}}0 peer {STRANGER} allowed-ips 0.0.0.0/0", f"peer {{t}}0 {STRANGER}", "wireguard"),
    "keepalive": Hand(f"wg set {{t}}0 peer {PEERS[0]} persistent-keepalive off", f"peer {{t}}0 {PEERS[0]}", "wireguard"),
    "listen port": Hand("wg set {t}0 listen-port 4444", "link {t}0", "link"),
    "private key": Hand("wg genkey | wg set {t}0 private-key /dev/stdin", "link {t}0", "link"),
    "sysctl": Hand("sysctl -qw net.ipv4.ip_forward=0", "sysctl net/ipv4/ip_forward", "sysctl"),
    "rp_filter": Hand("sysctl -qw net/ipv4/conf/{o}1/rp_filter=1", "sysctl net/ipv4/conf/{o}1/rp_filter", "sysctl"),
    "route": Hand("ip route del 10.200.1.0/24 table 7002", "route 7002 10.200.1.0/24 0", "route"),
}


@pytest.mark.parametrize("name", HANDS)
def test_what_a_hand_changes_is_one_event_repaired_and_resolved(audited: Audited, name: str) -> None:
    """Raised once with the wanted and the found, repaired whole, resolved; what is not ours is as it was."""
    hand = HANDS[name]

    async def story(host: Watched) -> None:
        host.run("ip link add other0 type bridge; ip addr add 10.66.0.1/24 dev other0; ip addr add fd00:66::1/64 dev other0 nodad")
        before = host.state()
        host.run(hand.commands)
        raised, resolved = await host.next(), await host.next()
        assert [(event.key, event.layer, event.state) for event in (raised, resolved)] == [
            (host.named(hand.key), hand.layer, state) for state in ("raised", "resolved")
        ]
        assert raised.wanted != raised.found
        assert await host.is_silent()
        assert await host.applier.differences() == []
        assert host.state() == before

    audited(story)


def test_a_link_that_is_down_waits_for_its_owner_and_then_all_is_back(audited: Audited) -> None:
    """With links to be told only: one event while it is down, none for its routes; once somebody sets it up, all that was on it comes back,
    addresses of IPv6 included, though nobody repairs links."""

    async def story(host: Watched) -> None:
        before = host.state()
        host.run("ip link set {o}6 down")
        key = host.named("link {o}6")
        assert await host.story(1) == [(key, "raised")]
        assert await host.is_silent()
        assert host.applier.asked == []
        host.run("ip link set {o}6 up")
        changed = await host.next()
        assert (changed.key, changed.state, changed.found) == (key, "changed", FALLEN)
        assert await host.story(1) == [(key, "resolved")]
        assert host.state() == before
        assert {asked.leave for asked in host.applier.asked} == {("link",)}

    audited(story, DriftPolicy(link="alert"))


def test_with_alert_nothing_is_repaired(audited: Audited) -> None:
    """In every new layer: told once, left as it is, and resolved when a hand puts it right."""
    policy = DriftPolicy(link="alert", address="alert", wireguard="alert", sysctl="alert")

    async def story(host: Watched) -> None:
        for there, back, key in (
            ("ip link set {o}1 mtu 1300", "ip link set {o}1 mtu 1450", "link {o}1"),
            ("ip addr add 10.4.4.4/32 dev {o}1", "ip addr del 10.4.4.4/32 dev {o}1", "address {o}1 10.4.4.4/32"),
            (
                f"wg set {{t}}0 peer {PEERS[2]} allowed-ips 10.9.0.0/16",
                f"wg set {{t}}0 peer {PEERS[2]} allowed-ips {REST}",
                f"peer {{t}}0 {PEERS[2]}",
            ),
            ("sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv4.ip_forward=1", "sysctl net/ipv4/ip_forward"),
        ):
            host.run(there)
            assert await host.story(1) == [(host.named(key), "raised")]
            assert await host.is_silent(2 * QUIET_S)
            host.run(back)
            assert await host.story(1) == [(host.named(key), "resolved")]
        assert host.applier.asked == []

    audited(story, policy)


def test_links_and_addresses_of_others_are_nobody_s_business(audited: Audited) -> None:
    """Links come and go, with addresses, settings and peers of their own: no event, no repair."""

    async def story(host: Watched) -> None:
        for number in range(5):
            host.run(
                f"ip link add other{number} type vxlan id {number} local 127.0.0.1 remote 127.0.0.9 dstport 4999 nolearning;"
                f"ip link set other{number} up; ip addr add 10.66.{number}.1/24 dev other{number}; ip link set other{number} down"
            )
        host.run("ip link del other0; sysctl -qw net.ipv4.conf.other1.rp_filter=1; ip addr add 10.67.0.1/32 dev lo")
        assert await host.is_silent()
        assert host.applier.asked == []

    audited(story)


def test_the_process_behind_a_change_of_an_address_is_named(audited: Audited) -> None:
    """The kernel says whose socket an IPv4 address came by; of WireGuard it says nothing."""

    async def story(host: Watched) -> None:
        host.run("ip addr add 10.4.4.4/32 dev {o}1")
        raised = await host.next()
        assert raised.suspect is not None
        assert raised.suspect.pid > 0
        assert (await host.next()).state == "resolved"
        host.run(f"wg set {{t}}0 peer {PEERS[2]} remove")
        assert (await host.next()).suspect is None
        assert (await host.next()).state == "resolved"

    audited(story)


def test_a_hundred_looks_at_an_untouched_host_find_nothing(audited: Audited) -> None:
    """Round after round, and with the noise of routes and links of others: no difference is told and nothing is written."""

    async def story(host: Watched) -> None:
        for number in range(100):
            host.run(f"ip route add blackhole 10.{number + 100}.0.0/16")
        assert await host.is_silent(10 * QUIET_S)
        assert host.applier.turns == 1

    audited(story)
