"""Strict mode, by packets: somebody breaks what leads packets into a device, and what is in clear is counted, then dropped, both ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schemas.values import IPV4, IPV6, Family
from tests.encryption import wire
from tests.encryption.conftest import Made
from tests.encryption.site import Mode, Site

NATIVE, VXLAN, GENEVE, WITH_NODES = Mode("native"), Mode("vxlan"), Mode("geneve"), Mode("native", nodes=True)
WAYS = [(IPV4, mode, IPV4) for mode in (NATIVE, VXLAN, GENEVE, WITH_NODES)] + [
    (IPV4, VXLAN, IPV6),
    (IPV4, GENEVE, IPV6),
    (IPV6, NATIVE, IPV6),
]
"""The underlay's family, the mode, and the family of what pods say: natively only the underlay's can leave in clear. What nodes say changes
nothing about pods' packets, so that one family of these is enough there."""
EACH = pytest.mark.parametrize(
    "underlay, mode, family",
    [pytest.param(*way, id=f"{way[1]}-ipv{way[2]}-over-ipv{way[0]}") for way in WAYS],
    indirect=["underlay"],
    scope="module",  # all tests of a way one after the other: a site is made once for each underlay
)
WHOSE = {"native": "pods", "vxlan": "overlay", "geneve": "overlay"}
pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240), EACH]
ONE, TWO = "worker-1", "worker-2"
SHORT_S = 1.5


@pytest.fixture(autouse=True)
def repaired(site: Site) -> Iterator[None]:
    """What a test breaks by hand is whole again for the next one."""
    yield
    site.change(strict="audit")
    for name in (ONE, TWO):
        site.again("rome", name, restart=True)


def exposed(made: Made, mode: Mode, strict: str) -> Site:
    """The cluster, strict in this way, whose first node sends in clear. It sends and hears what it did before nothing was counted."""
    site = made(mode)
    site.change(strict=strict)
    site.expose(ONE)
    return site


def grown(site: Site, before: dict[str, dict[str, int]]) -> set[tuple[str, str]]:
    """What has been counted since, by node and by words of the rule."""
    return {(name, words) for name in (ONE, TWO) for words, count in wire.counted(site, name).items() if count > before[name].get(words, 0)}


def counts(site: Site) -> dict[str, dict[str, int]]:
    return {name: wire.counted(site, name) for name in (ONE, TWO)}


@pytest.mark.parametrize("client,server", [("shop", "stock"), ("stock", "shop")], ids=["requests", "answers"])
async def test_audit_counts_at_both_ends_and_drops_nothing(turned: Made, mode: Mode, family: Family, client: str, server: str) -> None:
    """What leaves in clear is counted by who sends it and by who hears it, be it asked for or an answer."""
    site = exposed(turned, mode, "audit")
    before = counts(site)
    with wire.watched() as seen:
        talk = await wire.talk(f"rome.pod.{client}", f"rome.pod.{server}", site.pod(server, family), family)
    words = talk.request if client == "shop" else talk.answer
    assert wire.says(seen.uplinks[0], words, outgoing=True)
    whose = WHOSE[mode.way]
    assert grown(site, before) >= {(ONE, f"{whose}: left in clear"), (TWO, f"{whose}: arrived in clear")}


@pytest.mark.parametrize("client,server", [("shop", "stock"), ("stock", "shop")], ids=["requests", "answers"])
async def test_enforced_nothing_leaves(turned: Made, mode: Mode, family: Family, client: str, server: str) -> None:
    """The sender itself drops and counts it; none of it is on its uplink."""
    site = exposed(turned, mode, "enforce")
    before = counts(site)
    with wire.watched() as seen, pytest.raises(TimeoutError):
        await wire.talk(f"rome.pod.{client}", f"rome.pod.{server}", site.pod(server, family), family, patience_s=SHORT_S)
    assert wire.in_clear(seen.uplinks[0], site.cluster()) == []
    assert grown(site, before) >= {(ONE, f"{WHOSE[mode.way]}: left in clear")}


@pytest.mark.parametrize("client,server", [("shop", "stock"), ("stock", "shop")], ids=["requests", "answers"])
async def test_enforced_nothing_that_arrives_in_clear_is_heard(turned: Made, mode: Mode, family: Family, client: str, server: str) -> None:
    """Where the sender's nftables are emptied as well, who hears it drops and counts it."""
    site = exposed(turned, mode, "enforce")
    site.hand(ONE, "nft", "delete", "table", "inet", wire.TABLE)
    before = wire.counted(site, TWO)
    with wire.watched() as seen, pytest.raises(TimeoutError):
        await wire.talk(f"rome.pod.{client}", f"rome.pod.{server}", site.pod(server, family), family, patience_s=SHORT_S)
    assert wire.in_clear(seen.uplinks[0], site.cluster()) != []
    words = f"{WHOSE[mode.way]}: arrived in clear"
    assert wire.counted(site, TWO)[words] > before.get(words, 0)
