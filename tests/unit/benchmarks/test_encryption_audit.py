"""What the nodes that are measured differ in: what looks for packets in clear, and what counts; what leads packets is the same."""

from __future__ import annotations

from benchmarks.figures.encryption_audit import UNCOUNTED, UNWATCHED, WHOLE, variants
from schemas.host_objects import NftChain, PlanObject
from schemas.nft import Counter, Match, SetMark, Verdict
from services.kernel.transaction import named_sets
from services.planner.state import HostId
from tests.topologies import encrypting, settled_plans

FOUND = variants(settled_plans(encrypting())[HostId("rome", "worker-1")])


def chains(objects: dict[str, PlanObject]) -> dict[str, NftChain]:
    return {item.name: item for item in objects.values() if isinstance(item, NftChain)}


def test_each_variant_has_less() -> None:
    """Without the chains of strict mode; then without counters of points, where those that drop keep theirs."""
    whole, unwatched, uncounted = (chains(FOUND[name]) for name in (WHOLE, UNWATCHED, UNCOUNTED))
    assert whole.keys() - unwatched.keys() == {"strict_in", "strict_out", "clear_in_pods", "clear_out_pods"}
    assert unwatched.keys() == uncounted.keys()
    counting = [rule for chain in uncounted.values() for rule in chain.rules if Counter() in rule]
    assert all(Verdict("drop") in rule for rule in counting)
    assert not any(all(isinstance(item, Match) for item in rule) for chain in uncounted.values() for rule in chain.rules)


def test_what_leads_packets_is_the_same() -> None:
    """Each mark is written in all of them, and every set that a rule names is there."""
    for objects in FOUND.values():
        marks = [item for chain in chains(objects).values() for rule in chain.rules for item in rule if isinstance(item, SetMark)]
        assert len(marks) == len(
            [item for chain in chains(FOUND[WHOLE]).values() for rule in chain.rules for item in rule if isinstance(item, SetMark)]
        )
        needed = {f"set {chain.table} {name}" for chain in chains(objects).values() for rule in chain.rules for name in named_sets(rule)}
        assert needed <= objects.keys()
