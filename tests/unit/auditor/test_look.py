"""A look at the kernel in memory: what it is told of what is wanted, and what it makes of layers that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.plan import Entry, HostPlan
from schemas.values import Endpoint, Key, Name, Prefix
from services.applier.core import Applier
from services.auditor.compare import compare
from services.auditor.findings import LAYERS
from services.auditor.look import look
from services.kernel.fake import FakeHost, FakeKernel

KEY = Key("x" * 42 + "A=")


def test_an_endpoint_that_is_a_name_may_be_anywhere() -> None:
    """What the name leads to is for the applier to know; another difference of the peer is told all the same."""
    link = WireguardLink("mt.0", 51820, 1420)
    peer = WireguardPeer("mt.0", KEY, Endpoint("gw.example.net:51820"), (Prefix("10.9.0.0/16"),))
    items: Mapping[str, PlanObject] = {item.key: item for item in (link, peer)}
    plan = HostPlan(Name("rome"), Name("a"), {"one": {key: Entry(item, ()) for key, item in items.items()}})
    host = FakeHost()
    Applier(FakeKernel(host), lambda: 0.0).apply(plan, 1, 1)
    kernel = FakeKernel(host, looks_only=True)
    for endpoint in (None, Endpoint("192.0.2.1:51820"), Endpoint("192.0.2.2:7")):
        host.objects[peer.key] = WireguardPeer("mt.0", KEY, endpoint, peer.allowed_ips)
        assert compare(look(kernel, items, LAYERS, set(), with_links=True).view, plan, set(LAYERS)) == []
    host.objects[peer.key] = WireguardPeer("mt.0", KEY, None, peer.allowed_ips, 9)
    assert [finding.key for finding in compare(look(kernel, items, LAYERS, set(), with_links=True).view, plan, set(LAYERS))] == [peer.key]
