"""A chain that changes is changed rule by rule: the kernel then holds what it holds when the chain is written whole, and what stayed has
counted on.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.nft import Comment, Counter, Match, Rule, Verdict, VerdictMap
from services.kernel.nfnetlink import batch as batches
from services.kernel.nfnetlink import chains
from services.kernel.nfnetlink.engine import Nfnetlink
from services.kernel.nft.engine import LibNftables
from services.kernel.nftread.dumps import Dumps
from services.kernel.transaction import Change, ListedChain, Marker, changes
from tests.contract.kernel.engine_pair import Pair, Side
from tests.contract.kernel.gateway_plan import gateway_plan
from tests.contract.kernel.test_nfnetlink import meanwhile
from tests.emulated import examples
from tests.nft_objects import nft_plans

pytestmark = pytest.mark.privileged

T = "meshmark.e"
ACCEPT = (Verdict("accept"),)


def counting(name: str) -> Rule:
    """A rule that counts every packet, and is known by its comment."""
    return Counter(), Comment(name)


def chain_of(*names: str) -> NftChain:
    return NftChain(T, "c", tuple(map(counting, names)), "filter", "output", 0)


def plan_of(*items: PlanObject) -> dict[str, PlanObject]:
    return {item.key: item for item in (NftTable(T), *items)}


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side(Nfnetlink)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def raw(side: Side) -> Iterator[Dumps]:
    made = side.call(Dumps)
    yield made
    side.call(made.close)


@pytest.fixture
def stranger(side: Side) -> Iterator[Callable[[str], str]]:
    other = side.call(LibNftables)
    yield lambda text: str(side.call(other.run, text))
    side.call(other.close)


def packet(side: Side) -> None:
    """One packet leaves by lo."""

    def send() -> None:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"x", ("127.0.0.1", 9))

    side.call(send)


def counts(side: Side, raw: Dumps) -> dict[str, tuple[int, int]]:
    """Handle and packets by the rules' comments, in their order."""
    return {item.comment: (item.handle, item.packets) for item in side.call(raw.counted, T)}


STEPS = {
    "one replaced": ("abcde", "abxde", 4),
    "one added at the end": ("abcde", "abcdex", 5),
    "one added at the begin": ("abcde", "xabcde", 5),
    "one added between": ("abcde", "abxcde", 5),
    "some added and gone": ("abcde", "xbydz", 2),
    "one gone": ("abcde", "abde", 4),
    "the first moved to the end": ("abcde", "bcdea", 4),
    "turned about": ("abcde", "edcba", 1),
}
"""Rules before and after, and how many of them stay."""


@pytest.mark.parametrize("is_remembered", [True, False], ids=["remembered", "asked for"])
@pytest.mark.parametrize("name", STEPS)
def test_rules_that_stay_count_on(side: Side, raw: Dumps, name: str, is_remembered: bool) -> None:
    """With their handles, by what the engine remembers and by what it asks the kernel for."""
    before, after, staying = STEPS[name]
    side.commit(changes({}, plan_of(chain_of(*before))), None)
    if is_remembered:
        assert side.commit([Change(chain_of(*before), chain_of(*before, "y"))], None) is None
        assert side.commit([Change(chain_of(*before, "y"), chain_of(*before))], None) is None
        assert (T, "c") in side.engine._chains._held
    packet(side)
    held = counts(side, raw)
    assert all(packets for _, packets in held.values())
    assert side.commit([Change(chain_of(*before), chain_of(*after))], Marker(1, 2, {})) is None
    found = counts(side, raw)
    assert "".join(found) == after
    assert len(found.items() & held.items()) == staying
    assert all(packets == 0 for _, packets in dict(found.items() - held.items()).values())
    packet(side)
    assert all(packets > found[name][1] for name, (_, packets) in counts(side, raw).items()), "all of them count"


def test_a_repair_leaves_what_is_right(side: Side, raw: Dumps, stranger: Callable[[str], str]) -> None:
    """Somebody removed one rule and added two: of the others none is written."""
    chain = chain_of(*"abcd")
    side.commit(changes({}, plan_of(chain)), None)
    packet(side)
    held = counts(side, raw)
    stranger(f"delete rule inet {T} c handle {held['b'][0]}")
    stranger(f'insert rule inet {T} c counter comment "odd"\nadd rule inet {T} c accept')
    listed = side.call(lambda: [side.engine.looking(), side.lister.read(T, {})[chain.key]][1])
    assert isinstance(listed, ListedChain)
    assert side.commit([Change(listed, chain)], None) is None
    found = counts(side, raw)
    assert list(found) == list("abcd")
    assert {name: found[name] for name in "acd"} == {name: held[name] for name in "acd"}
    assert found["b"][1] == 0


def test_what_the_engine_remembers_is_not_believed_after_a_stranger(side: Side, stranger: Callable[[str], str]) -> None:
    """A rule of theirs, which was read and is not in what is held to be there, goes."""
    side.commit(changes({}, plan_of(chain_of(*"abc"))), None)
    side.commit([Change(chain_of(*"abc"), chain_of(*"abd"))], None)
    stranger(f"add rule inet {T} c accept")
    side.call(side.engine.looking)
    assert side.commit([Change(chain_of(*"abd"), chain_of(*"abx"))], None) is None
    assert "accept" not in stranger(f"list chain inet {T} c").replace('"policy": "accept"', "")


def test_a_stranger_elsewhere_does_not_make_it_forget(side: Side, stranger: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transaction since was heard of, and none was about our tables."""
    side.commit(changes({}, plan_of(chain_of(*"abc"))), None)
    side.commit([Change(chain_of(*"abc"), chain_of(*"abd"))], None)
    stranger("add table inet other")
    monkeypatch.setattr(chains.Chains, "_asked", lambda *_: pytest.fail("the kernel was asked"))
    side.call(side.engine.looking)
    assert side.commit([Change(chain_of(*"abd"), chain_of(*"abx"))], None) is None
    stranger("add table inet another")
    assert side.commit([Change(chain_of(*"abx"), chain_of(*"aby"))], None) is None


def test_a_busy_stranger_gets_the_chain_written_whole(side: Side, raw: Dumps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last try is without a generation, and without any belief in handles."""
    other, number = side.call(LibNftables), iter(range(99))
    side.commit(changes({}, plan_of(chain_of(*"abc"))), None)
    held = counts(side, raw)
    meanwhile(side, lambda: other.run(f"add table inet other{next(number)}"), monkeypatch)
    assert side.commit([Change(chain_of(*"abc"), chain_of(*"abd"))], None) is None
    found = counts(side, raw)
    assert list(found) == list("abd")
    assert not {handle for handle, _ in found.values()} & {handle for handle, _ in held.values()}
    side.call(other.close)


def test_more_new_rules_than_the_kernel_can_tell_of(side: Side, raw: Dumps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their handles are asked for at the next change."""
    monkeypatch.setattr(batches, "_ECHOED", 2)
    names = [f"r{number}" for number in range(20)]
    side.commit(changes({}, plan_of(chain_of("a", "b"))), None)
    packet(side)
    held = counts(side, raw)
    assert side.commit([Change(chain_of("a", "b"), chain_of("a", *names, "b"))], None) is None
    assert side.commit([Change(chain_of("a", *names, "b"), chain_of("a", *names[1:], "b"))], None) is None
    found = counts(side, raw)
    assert list(found) == ["a", *names[1:], "b"]
    assert {name: found[name] for name in "ab"} == held


def test_too_long_a_walk_is_not_walked(side: Side, raw: Dumps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where so much changes that the kernel would look for handles longer than the chain takes to write."""
    monkeypatch.setattr(chains, "_STEPS", 5)
    side.commit(changes({}, plan_of(chain_of(*"abc"))), None)
    held = counts(side, raw)
    assert side.commit([Change(chain_of(*"abc"), chain_of(*"xyc"))], None) is None
    assert counts(side, raw)["c"] != held["c"]


def test_a_refused_rule_of_an_edit_is_named(side: Side) -> None:
    """By its place in the chain, and nothing is made."""
    side.commit(changes({}, plan_of(chain_of(*"abc"))), None)
    bad = NftChain(
        T, "c", (*chain_of("a", "x", "b").rules, (Match("ip saddr", ("@nowhere",)), *ACCEPT), counting("c")), "filter", "output", 0
    )
    error = side.commit([Change(chain_of(*"abc"), bad)], None)
    assert f"add rule 4 of chain {T} c: No such file" in str(error)
    assert side.commit([Change(chain_of(*"abc"), chain_of(*"abd"))], None) is None


def test_all_forms_are_known_again(side: Side, raw: Dumps) -> None:
    """Of every statement that plans have, with sets without names: what is written again after a restart writes nothing."""
    plan = {key: item for key, item in gateway_plan("x").items() if item.layer == "nft"}
    side.commit(changes({}, plan), None)
    tables = [item.name for item in plan.values() if isinstance(item, NftTable)]
    handles = [side.call(raw.counted, table) for table in tables]
    again = [Change(item, item) for item in plan.values() if isinstance(item, NftChain)]
    side.engine._chains.forget()
    edits = side.call(lambda: side.engine._edits(again, is_certain=False))
    assert len(edits) == len([change for change in again if change.new.rules])  # type: ignore[union-attr]
    assert all(not edit.gone and not edit.coming for edit in edits.values())
    assert side.commit(again, None) is None
    assert [side.call(raw.counted, table) for table in tables] == handles


# By chance -----------------------------------------------------------------------------------------------------------------------------

POOL: list[Rule] = [
    *map(counting, "abcd"),
    (Match("ip saddr", ("10.0.0.1",)), Counter(), *ACCEPT),
    (Match("ip saddr", ("10.0.0.1", "10.0.0.9")), Counter(), *ACCEPT),
    (Match("tcp dport", ("80", "443")), *ACCEPT),
    (Match("ip saddr", ("@hosts",)), *ACCEPT),
    (VerdictMap("iifname", "names"),),
    (Verdict("jump", "other"),),
]
RULES = st.lists(st.sampled_from(POOL), max_size=12).map(tuple)
PLANS = st.builds(
    lambda rules, others, policy, has_timeout: plan_of(
        NftSet(T, "hosts", "ipv4_addr", timeout=has_timeout),
        NftSet(T, "names", "ifname", "verdict"),
        NftElement(T, "names", "lo", "jump other"),
        NftChain(T, "c", rules, "filter", "output", 0, policy),
        NftChain(T, "other", tuple(rule for rule in others if rule not in POOL[-2:])),
    ),
    RULES,
    RULES,
    st.sampled_from(["accept", "accept", "accept", "drop"]),
    st.sampled_from([False, False, False, True]),
)
BY_CHANCE = settings(max_examples=examples(40), deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    try:
        yield made
    finally:
        made.close()


@BY_CHANCE
@given(plans=st.lists(st.tuples(PLANS, st.booleans()), min_size=2, max_size=8))
def test_any_edits_are_what_writing_whole_is(pair: Pair, plans: list[tuple[dict[str, PlanObject], bool]]) -> None:
    """Rules come, go, move and change, in chains that are emptied and made anew: by either engine, remembered or asked for."""
    try:
        for plan, forgets in plans:
            if forgets:
                pair.native.engine._chains.forget()
            pair.hold(plan, Marker(1, 1, {}))
        pair.hold({})
    except BaseException:
        pair.reset()
        raise


@BY_CHANCE
@given(plan=nft_plans())
def test_any_chain_written_again_is_left_alone(pair: Pair, plan: dict[str, PlanObject]) -> None:
    """Rules of all statements are known again by what the kernel tells of them."""
    try:
        pair.hold(plan)
        again = [Change(item, item) for item in plan.values() if isinstance(item, NftChain) and item.rules]
        edits = pair.native.call(lambda: pair.native.engine._edits(again, is_certain=False))
        assert len(edits) == len(again)
        assert all(not edit.gone and not edit.coming for edit in edits.values())
        pair.hold({})
    except BaseException:
        pair.reset()
        raise


def test_what_the_kernel_tells_of_new_rules_fits_into_a_usual_buffer(side: Side) -> None:
    """Of many long ones it is not asked: what is lost of its answers would make a batch that it took one of which nobody knows."""

    def long(number: int) -> Rule:
        return (
            *(Match("ip saddr", (f"10.{number % 256}.{place}.0/24",), "!=") for place in range(16)),
            Counter(),
            Comment(f"{number}".ljust(120, "c")),
        )

    usual_bytes = 212_992  # net.core.rmem_max of most machines; the kernel doubles it
    side.call(lambda: side.engine._exchange._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, usual_bytes))
    first = chain_of("first")
    assert side.commit(changes({}, plan_of(first)), None) is None
    for number in (batches._ECHOED, 5 * batches._ECHOED):
        wanted = NftChain(T, "c", (*first.rules, *map(long, range(number))), "filter", "output", 0)
        assert side.commit([Change(first, wanted)], Marker(1, 1, {})) is None
        first = wanted
