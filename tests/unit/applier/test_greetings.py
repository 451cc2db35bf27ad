"""Who shakes hands on which of two devices, and who does not answer at all."""

from __future__ import annotations

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.status import Greeted, Greetings
from schemas.values import Key
from services.applier import greetings as module
from services.applier.greetings import ASKED_S, AWAY_S, greetings
from services.kernel.curve25519 import public_key
from services.kernel.port import PeerSeen

OLD, NEW, ONE, TWO, OTHER = (Key(public_key(bytes([number]) * 32)) for number in range(1, 6))
NOW_S = 10_000.0


def planned(*both: Key) -> list[PlanObject]:
    """Two devices with these peers on both, and one more on the first."""
    links: list[PlanObject] = [WireguardLink("me.0", 51871, 1420, OLD), WireguardLink("me.1", 51872, 1420, NEW)]
    return [
        *links,
        WireguardPeer("me.0", OTHER, None, ()),
        *(WireguardPeer(link, key, None, ()) for key in both for link in ("me.0", "me.1")),
    ]


def seen(**ages_s: dict[Key, float]) -> dict[str, list[PeerSeen]]:
    """Peers by device (``me0``), with the age of their handshakes; none where it is None."""
    return {f"me.{link[-1]}": [PeerSeen(key, None, NOW_S - age_s) for key, age_s in peers.items()] for link, peers in ages_s.items()}


def test_without_a_device_beside_nothing_is_said() -> None:
    """There is nothing to compare: one device, or those of several tunnels."""
    assert greetings([WireguardLink("me.0", 51871, 1420, OLD)], {}, NOW_S, 0.0) == Greetings()
    tunnels: list[PlanObject] = [WireguardLink(f"mt.{index}", 51840 + index, 1420, OLD) for index in range(3)]
    assert greetings([*tunnels, *(WireguardPeer(f"mt.{index}", ONE, None, ()) for index in range(3))], {}, NOW_S, 0.0) == Greetings()


def test_a_gateway_says_it_of_each_tunnel() -> None:
    """Of the one end that changes its key, which has the same peer on all."""
    links: list[PlanObject] = [WireguardLink("mt.0", 51840, 1420, OLD), WireguardLink("mt.beside", 51841, 1420, NEW)]
    ages = {"mt.0": [PeerSeen(ONE, None, NOW_S - 3)], "mt.beside": [PeerSeen(ONE, None, 0.0)]}
    found = greetings([*links, *(WireguardPeer(link, ONE, None, ()) for link in ages)], ages, NOW_S, 0.0)
    assert found == Greetings((Greeted("mt.0", OLD), Greeted("mt.beside", NEW, 1, (ONE,))))


def test_each_device_says_who_lacks() -> None:
    """Only peers that both have count; one that was fresh on either is there."""
    found = greetings(planned(ONE, TWO), seen(me0={ONE: 100.0, TWO: 1.0}, me1={ONE: 3.0}), NOW_S, 0.0)
    assert found == Greetings((Greeted("me.0", OLD), Greeted("me.1", NEW, 1, (TWO,))))
    assert found.on("me.1", NEW) == Greeted("me.1", NEW, 1, (TWO,))
    assert found.on("me.1", OLD) is None


def test_who_is_fresh_on_neither_is_away() -> None:
    """After the time that a session and its successor need, and not before keepalives were sent for a while."""
    ages = seen(me0={ONE: 1.0, TWO: AWAY_S + 1}, me1={ONE: 1.0})
    assert greetings(planned(ONE, TWO), ages, NOW_S, NOW_S - ASKED_S).away == (TWO,)
    asked = greetings(planned(ONE, TWO), ages, NOW_S, NOW_S - ASKED_S + 1)
    assert (asked.away, [device.lacking for device in asked.devices]) == ((), [1, 1])


def test_more_than_can_be_listed_lack(monkeypatch) -> None:
    """Whoever is not named is waited for."""
    monkeypatch.setattr(module, "_AWAY_MAX", 1)
    found = greetings(planned(ONE, TWO), seen(me0={}, me1={}), NOW_S, 0.0)
    assert (found.away, [device.lacking for device in found.devices]) == ((), [2, 2])
