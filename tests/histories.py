"""How two clusters came to be, as messages to a planner, and the orders in which these may come."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.topology import PublicKey, Topology
from schemas.values import Address, Name
from services.kernel.curve25519 import clamped, public_key
from services.planner.core import Said
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, gateway, node, peering, pod, said, two_clusters

PRIVATE_KEYS = {ROME_GATEWAY: clamped(bytes([1] * 32)), MILAN_GATEWAY: clamped(bytes([2] * 32))}
ANY_KEY = clamped(bytes([3] * 32))
"""The private key of a host that has no use for one."""
_FINAL = 100


def keys() -> list[Topology]:
    return [PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=public_key(private)) for host, private in PRIVATE_KEYS.items()]


def history() -> list[Said]:
    """Two clusters as they came to be: hosts that moved, tunnels that were added, a pod that roamed, and things that are gone again."""
    final = [*two_clusters(), *keys()]
    earlier: list[Topology] = [
        replace(gateway("rome"), addresses=(Address("172.18.0.99"),)),
        node("worker-2", 17),
        peering(1),
        pod("shop", "worker-2", "10.200.9.9"),
    ]
    gone: list[Topology] = [node("worker-7", 7), pod("guest", "worker-1", "10.200.1.77")]
    events = [said(item, number) for number, item in enumerate([*earlier, *gone], 1)]
    events += [Said((item.kind.lower(), item.home, item.name), b"", number) for number, item in enumerate(gone, 50)]
    return events + [said(item, number) for number, item in enumerate(final, _FINAL)]


EVENTS = history()
LAST_WORDS = [event for event in EVENTS if event.sequence >= _FINAL]
"""What is left of the history in the end, in the order in which it was said."""


@st.composite
def orders(draw: st.DrawFn, rests: st.SearchStrategy[bool]) -> list[tuple[Said, bool]]:
    """The history in any order, up to eight messages of it twice; each with whether hosts apply what is planned before the next one."""
    events = [*draw(st.permutations(EVENTS)), *draw(st.lists(st.sampled_from(EVENTS), max_size=8))]
    return list(zip(events, draw(st.lists(rests, min_size=len(events), max_size=len(events))), strict=True))
