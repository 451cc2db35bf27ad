"""The kernel's own bytes and libnftables' listings are each other's oracle: whatever somebody does to a plan, both find the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from socket import AF_INET6, inet_ntop, inet_pton

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from services.kernel.nfnetlink.engine import Nfnetlink
from services.kernel.nft.loading import LOADING
from services.kernel.nft.reference import Reference
from services.kernel.nft.statements import element_text
from services.kernel.nftread.dumps import Dumps
from services.kernel.nftread.reading import Reading
from services.kernel.nftread.words import rule_text
from services.kernel.transaction import ListedChain, changes, repairs
from services.runtime.errors import MeshmarkError
from tests.contract.kernel.engine_pair import Side
from tests.emulated import examples
from tests.nft_objects import TABLE, nft_plans

pytestmark = pytest.mark.privileged

RULES = (
    "accept",
    "counter drop",
    'ip saddr 10.0.0.0/8 counter comment "ours?"',
    "tcp dport { 22, 80-90 } accept",
    "meta mark set 0x7",
    "iif lo accept",
    "numgen inc mod 2 0 drop",
    "ip saddr . tcp dport { 10.0.0.1 . 22 } accept",
    "ct state vmap { new : drop, established : accept }",
)


class Both:
    """A namespace whose nftables are read in both ways."""

    def __init__(self) -> None:
        self.side = Side(Nfnetlink)
        self.dumps: Dumps = self.side.call(Dumps)
        self.own = Reference(LOADING["nfnetlink"])
        self.reading = Reading(self.dumps, remembers=True, known=self.own.known)
        self.listed = Reference(LOADING["libnftables"])

    def differing(self, plan: dict[str, PlanObject]) -> set[str]:
        """Keys of what differs, which are the same either way; rules of the kernel's can be said in words."""

        def work() -> tuple[set[str], set[str]]:
            observed = self.reading.read(plan)
            for item in observed.values():
                assert not isinstance(item, ListedChain) or all(map(rule_text, item.rules))
            own = repairs(plan, self.own.of(plan), observed)
            listed = repairs(plan, self.listed.of(plan), self.side.lister.read_all(plan))
            return {item.key for item in own}, {item.key for item in listed}

        own, listed = self.side.call(work)
        assert own == listed
        return set(own)

    def by_hand(self, text: str) -> bool:
        """Whether somebody who writes this was let."""
        with contextlib.suppress(MeshmarkError):
            self.side.call(self.side.lister.run, text)
            return True
        return False

    def close(self) -> None:
        self.side.call(self.dumps.close)
        self.side.close()


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    made = Both()
    try:
        yield made
    finally:
        made.close()


def is_written_as_read(plan: dict[str, PlanObject]) -> bool:
    """False where an element is the IPv4 address that some ancient IPv6 addresses stand for: ``::7`` may be written so, ``::7:0`` not."""
    elements = [item for item in plan.values() if isinstance(item, NftElement)]
    texts = [part.partition("/")[0] for item in elements for text in (item.element, item.value) for part in text.split("-") if ":" in part]
    return all(inet_ntop(AF_INET6, inet_pton(AF_INET6, text)) == text for text in texts)


@st.composite
def tamperings(draw: st.DrawFn, plan: dict[str, PlanObject]) -> str:
    """What somebody may do by hand to the table of a plan."""
    chains = [item.name for item in plan.values() if isinstance(item, NftChain)]
    sets = {item.name: item for item in plan.values() if isinstance(item, NftSet)}
    elements = [item for item in plan.values() if isinstance(item, NftElement)]
    chain, rule = draw(st.sampled_from(chains)), draw(st.sampled_from(RULES))
    texts = [
        f"add rule inet {TABLE} {chain} {rule}",
        f"insert rule inet {TABLE} {chain} {rule}",
        f"flush chain inet {TABLE} {chain}",
        f"add chain inet {TABLE} {chain} {{ policy drop; }}",
        f"add chain inet {TABLE} stranger",
        f"add set inet {TABLE} stranger {{ type ipv4_addr; flags interval; elements = {{ 10.0.0.0/8 }} }}",
        f"add counter inet {TABLE} stranger",
        "add table inet meshmark.stranger",
    ]
    texts += [f"flush {'map' if item.value_type else 'set'} inet {TABLE} {name}" for name, item in sets.items()]
    texts += [f"add element inet {TABLE} {name} {{ 203.0.113.9 }}" for name, item in sets.items() if item.key_type == "ipv4_addr"]
    if elements:
        gone = draw(st.sampled_from(elements))
        texts.append(f"delete element inet {TABLE} {gone.set} {{ {element_text(gone).split(' : ')[0]} }}")
    return draw(st.sampled_from(texts))


@settings(
    max_examples=examples(40),
    deadline=None,
    phases=[Phase.generate],  # what fails is told as it was found: to make it smaller in a kernel takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_both_ways_find_the_same(both: Both, data: st.DataObject) -> None:
    """Nothing of a plan that was written, whatever is tampered with, and nothing after it is written again."""
    plan = data.draw(nft_plans().filter(is_written_as_read))
    try:
        assert both.side.commit(changes({}, plan), None) is None
        assert both.differing(plan) == set()
        for _ in range(data.draw(st.integers(1, 3))):
            if both.by_hand(data.draw(tamperings(plan))):
                both.differing(plan)
    finally:
        both.by_hand("add table inet meshmark.stranger\ndelete table inet meshmark.stranger")
        both.side.call(both.side.engine.looking)
        table = NftTable(TABLE)
        assert both.side.commit(changes({table.key: table}, {}), None) is None


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_of_a_stranger_is_found(both: Both, rule: str) -> None:
    """And only its chain."""
    chain, other = NftChain(TABLE, "a", ()), NftChain(TABLE, "b", ())
    plan: dict[str, PlanObject] = {item.key: item for item in (NftTable(TABLE), chain, other)}
    assert both.side.commit(changes({}, plan), None) is None
    try:
        assert both.by_hand(f"add rule inet {TABLE} a {rule}")
        assert both.differing(plan) == {chain.key}
        assert both.by_hand(f"flush chain inet {TABLE} a")
        assert both.differing(plan) == set()
    finally:
        both.side.call(both.side.engine.looking)
        assert both.side.commit(changes(plan, {}), None) is None
