"""The nfnetlink engine in a real kernel: whom a refusal names, what strangers do meanwhile, and how much goes through at once."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.nft import Counter, Match, Verdict
from services.kernel.netlink import NETLINK_NETFILTER, NetlinkError, NetlinkSocket, attributes, each_attribute, text_attribute
from services.kernel.nfnetlink import watch
from services.kernel.nfnetlink.engine import Nfnetlink
from services.kernel.nfnetlink.exchange import Exchange, Outcome
from services.kernel.nfnetlink.wire import SUBSYSTEM
from services.kernel.nft.engine import LibNftables
from services.kernel.transaction import Change, Listed, Marker, changes
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient
from tests.contract.kernel.engine_pair import Side

pytestmark = pytest.mark.privileged

T = "meshmark.n"
ACCEPT, DROP = (Verdict("accept"),), (Counter(), Verdict("drop"))
BASE = {
    item.key: item
    for item in (
        NftTable(T),
        NftSet(T, "hosts", "ipv4_addr"),
        NftElement(T, "hosts", "10.0.0.1"),
        NftSet(T, "prefixes", "ipv4_addr", interval=True),
        NftElement(T, "prefixes", "10.0.0.0/8"),
        NftChain(T, "c", (ACCEPT,), "filter", "forward", 0),
    )
}


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side(Nfnetlink)
    try:
        yield made
    finally:
        made.close()


def held(side: Side) -> dict[str, object]:
    def read() -> dict[str, object]:
        side.engine.looking()
        return dict(side.lister.read_all({}))

    return dict(side.call(read))


def added(*items: PlanObject) -> list[Change]:
    return [Change(None, item) for item in items]


# Who is named --------------------------------------------------------------------------------------------------------------------------


def _elements(bad: str, name: str = "hosts") -> list[Change]:
    """A hundred elements of which the one in the middle is refused."""
    texts = [f"11.0.0.{number}" for number in range(100)]
    texts[50] = bad
    return [Change(NftElement(T, name, text), None) if text == bad else Change(None, NftElement(T, name, text)) for text in texts]


RULES = (ACCEPT, DROP, (Match("ip saddr", ("10.0.0.1", "10.0.0.9")), *ACCEPT), (Match("ip saddr", ("@nowhere",)), *ACCEPT), ACCEPT)
NAMED = {
    "the rule": (added(NftChain(T, "new", RULES)), f"add rule 4 of chain {T} new: No such file"),
    "the rule's jump": (added(NftChain(T, "new", (ACCEPT, (Verdict("jump", "nowhere"),)))), f"add rule 2 of chain {T} new: No such file"),
    "the element that is to go": (_elements("12.0.0.0"), f"delete element {T} hosts 12.0.0.0: No such file"),
    "the new interval": (
        added(*(NftElement(T, "prefixes", text) for text in ("9.0.0.0/8", "11.0.0.0/8", "10.1.0.0/16", "12.0.0.0/8"))),
        f"add element {T} prefixes 10.1.0.0/16",
    ),
    "the set": (added(NftSet(T, "prefixes", "mark")), f"add set {T} prefixes: File exists"),
    "the chain": ([Change(NftChain(T, "gone", ()), None)], f"flush chain {T} gone: No such file"),
    "the table": ([Change(NftTable("meshmark.gone"), None)], "delete table meshmark.gone: No such file"),
    "the set of new elements": (added(NftElement(T, "nowhere", "10.0.0.1")), f"cannot look at the set {T} nowhere"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_refusal_names_the_object(side: Side, name: str) -> None:
    """Of many in one transaction, and nothing of it is made."""
    batch, words = NAMED[name]
    assert side.commit(changes({}, BASE), None) is None
    before = held(side)
    good = added(NftElement(T, "hosts", "10.9.0.1"), NftChain(T, "other", (ACCEPT, DROP)))
    error = side.commit([*good, *batch], Marker(1, 1, {}))
    assert isinstance(error, Conflict)
    assert words in str(error)
    assert held(side) == before


def test_the_first_of_many_refusals_is_named_though_the_kernels_answers_do_not_fit(side: Side) -> None:
    """Tens of thousands of rules are refused, and most of the answers are lost."""
    side.commit(changes({}, BASE), None)
    before = held(side)
    error = side.commit(added(NftChain(T, "new", (ACCEPT, *((Match("ip saddr", ("@nowhere",)),),) * 60_000))), None)
    assert isinstance(error, Conflict)
    assert f"add rule 2 of chain {T} new: No such file" in str(error)
    assert held(side) == before
    assert side.commit(added(NftElement(T, "hosts", "10.9.0.1")), None) is None


def test_what_is_beyond_the_socket_is_refused_before_it_is_sent(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody may have a larger buffer."""
    monkeypatch.setattr(Exchange, "_make_room", lambda *_: None)
    batch = added(NftTable(T), NftChain(T, "c", (DROP,) * 10_000))
    error = side.commit(batch, None)
    assert isinstance(error, Permanent)
    assert "net.core.wmem_max" in str(error)
    assert held(side) == {}


# What strangers do meanwhile -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stranger(side: Side) -> Iterator[Callable[[str], str]]:
    """Runs nft text in the same namespace, by another socket."""
    other = side.call(LibNftables)
    yield lambda text: str(side.call(other.run, text))
    side.call(other.close)


def meanwhile(side: Side, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch, times: int = 99) -> list[int | None]:
    """Do something right before each of the next batches is sent; returns a list that their expected generations come into."""
    expected: list[int | None] = []
    send = side.engine._exchange.send

    def sent(batch: list[bytes], generation: int | None, **more: bool) -> Outcome:
        expected.append(generation)
        if len(expected) <= times:
            work()
        return send(batch, generation, **more)

    monkeypatch.setattr(side.engine._exchange, "send", sent)
    return expected


def test_a_stranger_who_leaves_our_tables_alone_is_no_reason_to_stop(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is sent again, with the new generation."""
    other = side.call(LibNftables)
    side.commit(changes({}, BASE), None)
    expected = meanwhile(side, lambda: other.run("add table inet other"), monkeypatch, 1)
    assert side.commit(added(NftElement(T, "hosts", "10.0.0.2")), None) is None
    assert len(expected) == 2
    assert expected[1] == expected[0] + 1  # type: ignore[operator]
    assert f"element {T} hosts 10.0.0.2" in held(side)
    side.call(other.close)


def test_a_busy_stranger_does_not_hold_us_up(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a transaction of theirs before each of ours, the fourth time goes without a generation."""
    other, number = side.call(LibNftables), iter(range(99))
    side.commit(changes({}, BASE), None)
    expected = meanwhile(side, lambda: other.run(f"add table inet other{next(number)}"), monkeypatch)
    assert side.commit(added(NftElement(T, "hosts", "10.0.0.2")), None) is None
    assert [value is None for value in expected] == [False, False, False, True]
    assert f"element {T} hosts 10.0.0.2" in held(side)
    side.call(other.close)


def test_somebody_who_changed_a_table_of_ours_is_a_conflict(side: Side, stranger: Callable[[str], str]) -> None:
    """Who it was is said, nothing is written, and after reading again it is."""
    side.commit(changes({}, BASE), None)
    side.commit(added(NftElement(T, "hosts", "10.0.0.2")), None)
    stranger(f"add table inet other\nadd element inet {T} hosts {{ 10.0.0.7 }}")
    error = side.commit(added(NftElement(T, "hosts", "10.0.0.3")), None)
    assert isinstance(error, Conflict)
    assert f"table {T}" in str(error)
    assert f"by {Path('/proc/self/comm').read_text().strip()}" in str(error)
    found = held(side)
    assert f"element {T} hosts 10.0.0.7" in found
    assert f"element {T} hosts 10.0.0.3" not in found
    assert side.commit(added(NftElement(T, "hosts", "10.0.0.3")), None) is None


def test_a_long_life_without_reading_does_not_deafen(side: Side, stranger: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel tells of our own transactions would fill the watch's buffer."""
    monkeypatch.setattr(watch, "_BUFFER_BYTES", 1 << 18)
    side.commit(changes({}, BASE), None)
    for number in range(1000):
        side.commit(added(NftElement(T, "hosts", f"10.3.{number >> 8}.{number & 255}")), Marker(1, number, {}))
    stranger(f"add element inet {T} hosts {{ 10.0.0.7 }}")
    assert isinstance(side.commit(added(NftElement(T, "hosts", "10.0.0.3")), None), Conflict)


@pytest.mark.parametrize("rules", [1, 2000])
def test_what_was_read_before_is_no_conflict(side: Side, stranger: Callable[[str], str], rules: int) -> None:
    """A change by hand that the reader has seen may be written over, by a small transaction and by a large one."""
    side.commit(changes({}, BASE), None)
    stranger(f"flush chain inet {T} c")
    held(side)
    old = BASE[f"chain {T} c"]
    assert side.commit([Change(old, NftChain(T, "c", (ACCEPT,) * rules, "filter", "forward", 0))], None) is None
    assert side.commit(added(NftElement(T, "hosts", "10.0.0.2")), None) is None


def test_what_a_set_is_like_is_asked_once(side: Side, stranger: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as strangers leave our tables alone, and a set is not made anew by ourselves."""
    side.commit(changes({}, BASE), None)
    assert side.commit(added(NftElement(T, "hosts", "10.0.0.2")), None) is None
    assert side.commit(added(NftElement(T, "hosts", "10.0.0.3")), None) is None
    stranger("add table inet other")
    monkeypatch.setattr(side.engine._exchange, "ask", lambda *_: pytest.fail("the kernel was asked"))
    assert side.commit(added(NftElement(T, "hosts", "10.0.0.4")), None) is None
    monkeypatch.undo()
    recreated = NftSet(T, "hosts", "ipv4_addr", interval=True)
    assert side.commit([Change(BASE[f"set {T} hosts"], recreated)], None) is None
    assert side.commit(added(NftElement(T, "hosts", "10.8.0.0/16")), None) is None
    assert f"element {T} hosts 10.8.0.0/16" in held(side)


def test_what_a_set_was_like_is_not_believed_after_a_stranger(side: Side, stranger: Callable[[str], str]) -> None:
    """Who made it anew with values of another type, which was read."""
    side.commit(changes({}, BASE), None)
    for number in range(2, 5):
        assert side.commit(added(NftElement(T, "hosts", f"10.0.0.{number}")), None) is None
    stranger(f"delete set inet {T} hosts\nadd set inet {T} hosts {{ type mark; }}")
    held(side)
    assert side.commit(added(NftElement(T, "hosts", "0x7")), None) is None
    assert {key for key in held(side) if key.startswith(f"element {T} hosts")} == {f"element {T} hosts 0x7"}


def test_our_own_transactions_are_no_strangers(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and large ones, refused ones, ones that change nothing and ones by libnftables: each is sent once."""
    side.commit(changes({}, BASE), None)
    expected = meanwhile(side, lambda: None, monkeypatch)
    for number in range(3):
        chain = NftChain(T, f"many{number}", (ACCEPT,) * 500)
        assert side.commit(added(chain, NftElement(T, "hosts", f"10.1.0.{number}")), None) is None
        assert side.commit([], None) is None
        assert isinstance(side.commit([Change(NftElement(T, "hosts", "10.8.8.8"), None)], None), Conflict)
        assert side.commit([Change(Listed("nft", f"counter {T} c{number}", ""), None)], None) is not None
    assert len(expected) == 9


# What is passed on, and how much goes at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,text", [("counter", ""), ("ct helper", ' { type "ftp" protocol tcp ; }'), ("quota", " { 25 bytes ; }")])
def test_what_has_no_form_here_goes_to_libnftables_as_a_whole(side: Side, stranger: Callable[[str], str], kind: str, text: str) -> None:
    """An object by name that somebody put into a table of ours is removed in one transaction with what else changes."""
    side.commit(changes({}, BASE), None)
    stranger(f"add {kind} inet {T} odd{text}")
    found = held(side)[f"{kind} {T} odd"]
    batch = [Change(found, None), *added(NftElement(T, "hosts", "10.0.0.2"), NftChain(T, "new", (ACCEPT,)))]  # type: ignore[arg-type]
    assert side.commit(batch, Marker(7, 7, {})) is None
    assert f"{kind} {T} odd" not in held(side)
    assert {f"element {T} hosts 10.0.0.2", f"chain {T} new"} <= held(side).keys()
    assert side.call(side.lister.marker) == Marker(7, 7, {})


def counted(side: Side) -> tuple[int, int]:
    """How many elements and rules the kernel dumps of the table; of an interval both ends."""

    def count() -> tuple[int, int]:
        with contextlib.closing(NetlinkSocket(NETLINK_NETFILTER)) as asked:
            where = bytes((1, 0, 0, 0)) + text_attribute(1, T)
            elements = 0
            for name in ("hosts", "prefixes"):
                for body in asked.dump(SUBSYSTEM | 13, where + text_attribute(2, name)):
                    listed = attributes(body, 4).get(3, b"")
                    elements += sum(1 for _ in each_attribute(listed))
            return elements, sum(1 for body in asked.dump(SUBSYSTEM | 7, where) if body)

    found: tuple[int, int] = side.call(count)
    return found


def test_more_than_a_message_and_a_usual_buffer_hold_goes_at_once(side: Side) -> None:
    """Elements beyond what 16 bits count, and thousands of rules: each is there, and can be taken away again."""
    hosts = [NftElement(T, "hosts", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}") for number in range(100_000)]
    prefixes = [NftElement(T, "prefixes", f"11.{number >> 7}.{(number & 127) * 2}.0/24") for number in range(5_000)]
    header = [NftTable(T), NftSet(T, "hosts", "ipv4_addr"), NftSet(T, "prefixes", "ipv4_addr", interval=True)]
    chain = NftChain(T, "c", tuple((Match("ip saddr", (item.element,)), *ACCEPT) for item in hosts[:8_000]))
    assert side.commit(added(*header, *hosts, *prefixes, chain), None) is None
    assert counted(side) == (len(hosts) + 2 * len(prefixes), len(chain.rules))
    assert side.commit([Change(item, None) for item in (*hosts, *prefixes, chain)], None) is None
    assert counted(side) == (0, 0)


def test_an_answer_that_does_not_come_is_of_unknown_outcome(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next transaction is not confused by it."""
    side.commit(changes({}, BASE), None)

    def lost(**_: object) -> Any:
        raise NetlinkError(errno.ETIMEDOUT, "no answer from the kernel")

    monkeypatch.setattr(side.engine._exchange, "_answers", lost)
    assert isinstance(side.commit(added(NftChain(T, "one", ())), None), OutcomeUnknown)
    monkeypatch.setattr(side.engine._exchange, "_answers", lost)
    assert isinstance(side.commit(added(NftElement(T, "hosts", "10.0.0.2")), None), Transient), "nothing was sent"
    assert side.commit(added(NftElement(T, "hosts", "10.0.0.3")), None) is None
    assert held(side).keys() - BASE.keys() == {f"chain {T} one", f"element {T} hosts 10.0.0.3"}


def test_a_closed_engine_says_so(side: Side) -> None:
    """And is no crash."""
    made: Nfnetlink = side.call(Nfnetlink)
    side.call(made.close)

    def commit() -> MeshmarkError | None:
        try:
            made.commit(added(NftTable(T)), None)
        except MeshmarkError as error:
            return error
        return None

    assert isinstance(side.call(commit), Permanent)
