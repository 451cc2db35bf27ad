"""A transaction as messages: which message is what, and what a refusal is about."""

from __future__ import annotations

import itertools

import pytest

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable
from schemas.nft import Match, Verdict
from services.kernel.netlink import HEADER
from services.kernel.nfnetlink import elements
from services.kernel.nfnetlink.batch import Batch, kind_of
from services.kernel.nfnetlink.elements import Header
from services.kernel.nfnetlink.rules import Encoders
from services.kernel.nfnetlink.values import IPV4_ADDRESS, Inexpressible
from services.kernel.nfnetlink.wire import Message
from services.kernel.nft.steps import steps
from services.kernel.transaction import Change, Listed, Marker

T = "meshmark.t"
ACCEPT = (Verdict("accept"),)
SEVERAL = (Match("ip saddr", ("10.0.0.1", "10.0.0.2")), *ACCEPT)


PLAIN = Header(IPV4_ADDRESS)


def batch(*changes: Change, marker: Marker | None = None, header: Header = PLAIN) -> Batch:
    return Batch(steps(changes, marker), Encoders(), lambda _table, _name: header)


def added(*items: NftTable | NftSet | NftElement | NftChain) -> list[Change]:
    return [Change(None, item) for item in items]


def places(message: bytes) -> list[int]:
    """Where the items of an element message are."""
    return [at for at, _ in elements._items(message)]


def test_messages_are_numbered_in_order() -> None:
    found = batch(*added(NftTable(T), NftChain(T, "c", (ACCEPT, SEVERAL)), NftSet(T, "s", "ipv4_addr")), marker=Marker(1, 2, {"a": "b"}))
    assert [HEADER.unpack_from(message)[3] for message in found.messages] == list(range(2, 2 + len(found.messages)))
    assert all(HEADER.unpack_from(message)[0] == len(message) for message in found.messages)


def test_every_message_is_known_by_what_it_does() -> None:
    changes = added(NftTable(T), NftSet(T, "s", "ipv4_addr"), NftChain(T, "c", (ACCEPT, SEVERAL, ACCEPT)))
    found = batch(*changes, Change(NftChain(T, "old", ()), None), marker=Marker(1, 2, {}))
    said = [found.culprit(number).deed for number in range(2, 2 + len(found.messages))]
    assert [text for text, _ in itertools.groupby(said)] == [
        f"add table {T}",
        f"flush chain {T} old",
        f"add chain {T} c",
        f"add set {T} s",
        f"flush chain {T} c",
        f"add rule 1 of chain {T} c",
        f"add rule 2 of chain {T} c",
        f"add rule 3 of chain {T} c",
        f"delete chain {T} old",
        "add table meshmark.marker",
        "add chain meshmark.marker plan",
        "flush chain meshmark.marker plan",
        "add rule 1 of chain meshmark.marker plan",
    ]
    keys = {found.culprit(number).key for number in range(2, 2 + len(found.messages))}
    assert keys == {*(change.key for change in changes), f"chain {T} old", "table meshmark.marker", "chain meshmark.marker plan"}
    assert said.count(f"add rule 2 of chain {T} c") == 3, "the rule's set, its elements, and the rule"
    assert found.culprit(1) == found.culprit(2 + len(found.messages)) == ("", "the whole transaction")


@pytest.mark.parametrize("interval", [False, True])
def test_the_element_that_is_refused_is_known_by_its_place(interval: bool) -> None:
    """In the last of the messages that ten thousand elements take; of an interval, both ends are the element."""
    items = [NftElement(T, "s", f"10.0.{number >> 7}.{(number & 127) * 2}") for number in range(10_000)]
    found = batch(*added(*items), header=Header(IPV4_ADDRESS, interval=interval))
    kinds = [kind_of(message) for message in found.messages]
    number = len(kinds) - kinds[::-1].index(Message.NEW_ELEMENTS) - 1
    assert kinds.count(Message.NEW_ELEMENTS) > 2
    assert all(len(message) < 1 << 16 for message in found.messages)
    each = 2 if interval else 1
    last = places(found.messages[number])
    for count in (0, 1, 2, 77, len(last) - 1):
        assert found.culprit(2 + number, last[-1 - count]).key == items[-1 - count // each].key
    assert found.culprit(2 + number).key == items[-(len(last) // each)].key, "where the kernel does not say, the first"


@pytest.mark.parametrize(
    "change",
    [
        Change(Listed("nft", f"counter {T} c", "{}"), None),
        Change(None, NftElement(T, "s", "eth0")),
        Change(None, NftElement(T, "s", "10.0.0.1", "10.0.0.2")),
        Change(None, NftSet(T, "m", "verdict", "ipv4_addr")),
    ],
)
def test_what_has_no_form_is_told(change: Change) -> None:
    """An object of another kind, a key or a value of another type than the set's."""
    with pytest.raises(Inexpressible):
        batch(change)
