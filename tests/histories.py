"""How two clusters came to be, as messages to a planner, and the orders in which these may come."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.topology import IpMapping, PublicKey, Topology
from schemas.values import Address, Name, Prefix
from services.kernel.curve25519 import clamped, public_key
from services.planner.core import Said
from services.planner.state import HostId
from tests.firewalls import match, one_chain, rule
from tests.routes import routes, to
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, cluster, gateway, node, peering, pod, said, two_clusters

ROME_WORKERS = HostId("rome", "worker-1"), HostId("rome", "worker-2")
PRIVATE_KEYS = {host: clamped(bytes([number] * 32)) for number, host in enumerate((ROME_GATEWAY, MILAN_GATEWAY, *ROME_WORKERS), 1)}
ANY_KEY = clamped(bytes([9] * 32))
"""The private key of a host that has no use for one."""
ROAMING = pod("roam", "worker-2", "10.200.1.99")
"""At an address of worker-1."""
_FINAL = 100


def keys() -> list[Topology]:
    return [PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=public_key(private)) for host, private in PRIVATE_KEYS.items()]


def final() -> list[Topology]:
    """Two clusters: one that encrypts, with a pod that roams, and takes a remap from its pool; with an address that is mapped, and
    published rules and routes."""
    rome = cluster("rome", encryption="wireguard", strict="audit", pools=(Prefix("10.96.0.0/14"),))
    joined = peering()
    joined = replace(joined, ends=(replace(joined.ends[0], remap_pods=()), joined.ends[1]))
    changed = {item.ref: item for item in (rome, joined)}
    return [*(changed.get(item.ref, item) for item in two_clusters()), *keys(), ROAMING, mapping(), ssh(), detour()]


def mapping(name: str = "printer", real: str = "192.0.2.50", **changes: object) -> IpMapping:
    return IpMapping(name=Name(name), cluster=Name("milan"), real=Address(real), **changes)  # type: ignore[arg-type]


def ssh(name: str = "ssh", port: int = 22) -> Topology:
    """A published rule for gateways, and a set in it."""
    matches = match("inInterface", "@tunnels"), match("protocol", "tcp"), match("destinationPort", port)
    return one_chain(rule(*matches, action="drop"), name=name, hosts={"role": "gateway"})


def detour(name: str = "detour", prefix: str = "10.9.0.0/16") -> Topology:
    """A published route by all tunnels, and the rule that leads there."""
    return routes(name, rules=[{"to": prefix}], routes=[to(prefix, "@tunnels")], hosts={"role": "gateway"})


def history() -> list[Said]:
    """Two clusters as they came to be: hosts that moved, tunnels that were added, a pod that roamed, what was published and then changed,
    encryption that was switched on; and things that are gone again, each of which was changed before that."""
    earlier: list[Topology] = [
        cluster("rome"),
        replace(gateway("rome"), addresses=(Address("172.18.0.99"),)),
        node("worker-2", 17),
        peering(1),
        pod("shop", "worker-2", "10.200.9.9"),
        mapping(real="192.0.2.51", node=Name("worker-2")),
        ssh(port=23),
        detour(prefix="10.8.0.0/16"),
    ]
    gone: list[tuple[Topology, Topology]] = [
        (node("worker-7", 7), node("worker-7", 8)),
        (pod("guest", "worker-1", "10.200.1.77"), pod("guest", "worker-2", "10.200.1.78")),
        (mapping("guest"), mapping("guest", "192.0.2.52", masquerade=True)),
        (ssh("guest", 2222), ssh("guest", 2223)),
        (detour("guest", "10.7.0.0/16"), detour("guest", "10.6.0.0/16")),
    ]
    events = [said(item, number) for number, item in enumerate([*earlier, *itertools.chain.from_iterable(gone)], 1)]
    events += [Said((item.kind.lower(), item.home, item.name), b"", number) for number, (item, _) in enumerate(gone, 50)]
    return events + [said(item, number) for number, item in enumerate(final(), _FINAL)]


EVENTS = history()
LAST_WORDS = [event for event in EVENTS if event.sequence >= _FINAL]
"""What is left of the history in the end, in the order in which it was said."""


@st.composite
def orders(draw: st.DrawFn, rests: st.SearchStrategy[bool]) -> list[tuple[Said, bool]]:
    """The history in any order, up to eight messages of it twice; each with whether hosts apply what is planned before the next one."""
    events = [*draw(st.permutations(EVENTS)), *draw(st.lists(st.sampled_from(EVENTS), max_size=8))]
    return list(zip(events, draw(st.lists(rests, min_size=len(events), max_size=len(events))), strict=True))
