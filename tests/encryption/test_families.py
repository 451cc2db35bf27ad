"""Pods of one family over an underlay of the other one alone, and strict mode and switches over an underlay of IPv6 alone, by packets.

What pods and nodes have in common is then no address at all: rules, sets and routes of either family must do without the other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from schemas.values import IPV4, IPV6, Family
from tests.encryption import wire
from tests.encryption.conftest import Made
from tests.encryption.site import UPLINK, Mode
from tests.encryption.streams import FLOWS, streams
from tests.encryption.test_paths import PATHS, goes_inside
from tests.encryption.test_strict import ONE, TWO, counts, grown
from tests.encryption.test_switching import RUN_S, turn

NATIVE, VXLAN, GENEVE = Mode("native"), Mode("vxlan"), Mode("geneve")
WAYS = [(mode, path) for mode in (NATIVE, VXLAN, GENEVE) for path in ("pod-to-pod", "node-to-pod")] + [(NATIVE, "pod-to-roaming-pod")]
BOTH = (IPV4, IPV6)
OVER_THE_OTHER = [pytest.param(IPV6, (IPV4,), id="ipv4-over-ipv6"), pytest.param(IPV4, (IPV6,), id="ipv6-over-ipv4")]
OVER_IPV6 = [pytest.param(IPV6, BOTH, id="both-over-ipv6")]
INDIRECT = ["underlay", "pods"]
pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]


@pytest.mark.parametrize("underlay, pods", OVER_THE_OTHER, indirect=INDIRECT)
@pytest.mark.parametrize("mode, path", [pytest.param(*way, id="-".join(map(str, way))) for way in WAYS])
async def test_pods_of_one_family_over_the_other_one(
    turned: Made, pods: tuple[Family], mode: Mode, path: str, record_property: Callable[[str, object], None]
) -> None:
    """Inside WireGuard alone, requests and answers, between pods, and from a node that has no address of their family."""
    (family,) = pods
    site = turned(mode)
    await goes_inside(site, mode, PATHS[path], family)
    record_property("mode", str(mode))
    record_property("path", f"{path} {mode} {family} alone over {site.underlay}")


@pytest.mark.parametrize("underlay, pods", OVER_THE_OTHER, indirect=INDIRECT)
async def test_nodes_of_one_family_with_pods_of_the_other(turned: Made, pods: tuple[Family]) -> None:
    """What nodes say to each other is encrypted beside what pods do."""
    site = turned(Mode("native", nodes=True))
    await goes_inside(site, Mode("native", nodes=True), PATHS["node-to-node"], site.underlay)
    await goes_inside(site, Mode("native", nodes=True), PATHS["pod-to-pod"], pods[0])


@pytest.mark.parametrize(
    "underlay, pods, mode, family",
    [
        pytest.param(IPV6, (IPV4,), VXLAN, IPV4, id="vxlan-ipv4-over-ipv6"),
        pytest.param(IPV4, (IPV6,), VXLAN, IPV6, id="vxlan-ipv6-over-ipv4"),
        pytest.param(IPV6, BOTH, VXLAN, IPV4, id="vxlan-both-over-ipv6"),
        pytest.param(IPV6, BOTH, NATIVE, IPV6, id="native-both-over-ipv6"),
    ],
    indirect=INDIRECT,
)
@pytest.mark.any_kernel
async def test_strict_mode_looks_there_too(turned: Made, mode: Mode, family: Family) -> None:
    """Audit counts what leaves in clear and what arrives so; enforced nothing of it leaves. Natively only the underlay's family could."""
    site = turned(mode)
    dial = site.pod("stock", family)
    try:
        site.change(strict="audit")
        site.expose(ONE)
        before = counts(site)
        with wire.watched_on(UPLINK) as uplinks:
            talk = await wire.talk("rome.pod.shop", "rome.pod.stock", dial, family)
        assert wire.says(uplinks[0], talk.request, outgoing=True)
        whose = "pods" if mode.is_native else "overlay"
        assert grown(site, before) >= {(ONE, f"{whose}: left in clear"), (TWO, f"{whose}: arrived in clear")}
        site.change(strict="enforce")
        site.expose(ONE)
        with wire.watched_on(UPLINK) as uplinks, pytest.raises(TimeoutError):
            await wire.talk("rome.pod.shop", "rome.pod.stock", dial, family, patience_s=1.5)
        assert wire.in_clear(uplinks[0], site.cluster()) == []
    finally:
        site.change(strict="audit")
        for name in (ONE, TWO):
            site.again("rome", name, restart=True)


@pytest.mark.parametrize("underlay, pods", OVER_IPV6, indirect=INDIRECT)
@pytest.mark.parametrize("before, after", [(NATIVE, VXLAN), (VXLAN, NATIVE), (NATIVE, Mode("native", nodes=True))], ids=str)
@pytest.mark.any_kernel
async def test_modes_change_over_ipv6(turned: Made, before: Mode, after: Mode, record_property: Callable[[str, object], None]) -> None:
    """As over IPv4: what is lost is what was sent while nodes differed, and nothing is in clear."""
    site = turned(before)
    with wire.watched_on(UPLINK) as uplinks:
        async with streams(site) as flows:
            await asyncio.sleep(RUN_S)
            so_far = flows.sent
            await asyncio.to_thread(turn, turned, site, after)
            during = flows.sent - so_far
            await asyncio.sleep(RUN_S)
    record_property("lost", f"{before} → {after} over IPv6: {flows}, of which {during} were sent while nodes turned")
    assert [wire.in_clear(uplink, site.cluster()) for uplink in uplinks] == [[], []]
    assert flows.lost <= (0 if before.way == after.way else during + len(flows.flows) * FLOWS)
    assert site.differences() == {}
