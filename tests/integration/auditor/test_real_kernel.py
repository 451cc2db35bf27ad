"""The auditor on a real kernel, beside an applier: what a hand changes in any layer is one event, repaired and resolved."""

from __future__ import annotations

import base64
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
ROUND_S = 0.05
STRANGER = public_key(bytes([9]) * 32)
REST = "10.9.0.0/16,10.8.1.0/24,10.8.0.0/32"
"""What the second peer of the first tunnel is allowed."""


class Hand(NamedTuple):
    """Commands, and the key and layer of the one event that they lead to."""

    commands: str
    key: str
    layer: str


HANDS = {
    "what goes with a link": (
        Hand("ip link set {o}1 down", "link {o}1", "link"),
        Hand("ip link set {o}1 down; ip link set {o}1 up", "link {o}1", "link"),
        Hand("ip link del {o}6", "link {o}6", "link"),
        Hand("ip link set {o}6 down; ip link set {o}6 up", "link {o}6", "link"),
        Hand("ip link del {t}0", "link {t}0", "link"),
        Hand("ip link set {t}0 down; ip link set {t}0 up", "link {t}0", "link"),
        Hand("ip link set {t}1 down", "link {t}1", "link"),
    ),
    "settings of links": (
        Hand("ip link set {o}1 mtu 1300", "link {o}1", "link"),
        Hand("ip link set {o}1 address 02:00:00:00:00:77", "link {o}1", "link"),
        Hand("ip link set {o}6 mtu 1200", "link {o}6", "link"),  # takes IPv6 off it
        Hand("ip link set {t}0 mtu 1300", "link {t}0", "link"),
        Hand("wg set {t}0 listen-port 4444", "link {t}0", "link"),
        Hand("wg genkey | wg set {t}1 private-key /dev/stdin", "link {t}1", "link"),
        Hand("ip link add mo.x type bridge; ip link set mo.x alias meshmark up; ip addr add 10.4.4.4/32 dev mo.x", "link mo.x", "link"),
        Hand("sysctl -qw net.ipv4.ip_forward=0", "sysctl net/ipv4/ip_forward", "sysctl"),
        Hand("sysctl -qw net/ipv4/conf/{o}1/rp_filter=1", "sysctl net/ipv4/conf/{o}1/rp_filter", "sysctl"),
    ),
    "addresses": (
        Hand("ip addr del 10.80.2.1/32 dev {o}1", "address {o}1 10.80.2.1/32", "address"),
        Hand("ip addr del fd00:80::1/128 dev {o}6", "address {o}6 fd00:80::1/128", "address"),
        Hand("ip addr del 169.254.18.1/30 dev {t}0", "address {t}0 169.254.18.1/30", "address"),
        Hand("ip addr add 10.4.4.4/32 dev {o}1", "address {o}1 10.4.4.4/32", "address"),
        Hand("ip route del 10.200.1.0/24 table 7002", "route 7002 10.200.1.0/24 0", "route"),
    ),
    "peers": (
        Hand(f"wg set {{t}}0 peer {PEERS[2]} remove", f"peer {{t}}0 {PEERS[2]}", "wireguard"),
        Hand(f"wg set {{t}}0 peer {PEERS[2]} allowed-ips {REST},0.0.0.0/0", f"peer {{t}}0 {PEERS[0]}", "wireguard"),
        Hand(f"wg set {{t}}0 peer {STRANGER} allowed-ips 0.0.0.0/0", f"peer {{t}}0 {STRANGER}", "wireguard"),
        Hand(f"wg set {{t}}0 peer {PEERS[0]} persistent-keepalive off", f"peer {{t}}0 {PEERS[0]}", "wireguard"),
        Hand(f"wg set {{t}}1 peer {PEERS[1]} endpoint 127.0.0.8:9", f"peer {{t}}1 {PEERS[1]}", "wireguard"),
    ),
}
"""By what they are about. No key comes more than twice: a third time is contested, and repaired later."""

WITHOUT_EVENTS = ("settings of links", "peers")
"""Where some of it is found by rounds; all the rest must be heard of from the kernel."""
NEVER_S = 3600.0


@pytest.mark.parametrize("about", HANDS)
def test_what_a_hand_changes_is_one_event_repaired_and_resolved(audited: Audited, about: str) -> None:
    """Raised once with the wanted and the found, repaired whole, resolved, one after the other; what is not ours is as it was."""

    async def story(host: Watched) -> None:
        host.run("ip link add other0 type bridge; ip addr add 10.66.0.1/24 dev other0; ip addr add fd00:66::1/64 dev other0 nodad")
        before = host.state()
        for hand in HANDS[about]:
            host.run(hand.commands)
            raised, resolved = await host.next(), await host.next()
            told = [(event.key, event.layer, event.state) for event in (raised, resolved)]
            key = host.named(hand.key)
            assert told == [(key, hand.layer, "raised"), (key, hand.layer, "resolved")], hand.commands
            assert raised.wanted != raised.found
            assert await host.applier.differences() == [], hand.commands
            assert host.state() == before, hand.commands
        assert await host.is_silent()

    audited(story, quiet_s=QUIET_S if about in WITHOUT_EVENTS else NEVER_S)


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


def test_a_peer_that_roams_is_no_difference(audited: Audited) -> None:
    """A far end that speaks from somewhere else than planned, and then from elsewhere again: a hundred looks find nothing, nothing is
    written, and the device keeps what it learned."""

    async def story(host: Watched) -> None:
        host.run(
            "ip link add {t}9 type wireguard 2>/dev/null || LOG_LEVEL=silent WG_I_PREFER_BUGGY_USERSPACE_TO_POLISHED_KMOD=1 "
            "wireguard-go {t}9 >/dev/null 2>&1; ip addr add 10.77.0.1/24 dev {t}9; ip link set {t}9 up"
        )
        own = host.run("wg show {t}0 public-key").strip()
        secret = base64.b64encode(bytes([1]) * 32).decode()
        host.run(
            f"echo {secret} | wg set {{t}}9 private-key /dev/stdin listen-port 51999 peer {own} endpoint 127.0.0.1:51840 "
            "allowed-ips 10.78.0.0/16 persistent-keepalive 1"
        )
        learned = set()
        for port in (51999, 52000, 52001):
            host.run(f"wg set {{t}}9 listen-port {port}")
            await host.until(lambda port=port: f":{port}" in host.run("wg show {t}0 endpoints"))  # type: ignore[misc]
            assert await host.is_silent(34 * ROUND_S)
            learned |= {line.split()[1] for line in host.run("wg show {t}0 endpoints").splitlines() if PEERS[0] in line}
        assert learned == {f"127.0.0.1:{port}" for port in (51999, 52000, 52001)}
        assert host.applier.asked == []

    audited(story, quiet_s=ROUND_S)


def test_the_noise_of_others_makes_no_difference(audited: Audited) -> None:
    """Routes and rules of others come and go while the host is looked at time and again: nothing is told, and nothing written."""

    async def story(host: Watched) -> None:
        for number in range(20):
            host.run(
                f"for i in 1 2 3 4 5; do ip route add blackhole 10.{number + 100}.$i.0/24; done; ip rule add pref {number + 50} lookup 9"
            )
        assert await host.is_silent()
        assert host.applier.turns == 1

    audited(story)
