"""Sets as the kernel dumps them: what our own messages write is read as what was written."""

from __future__ import annotations

import pytest

from schemas.host_objects import NftElement, NftSet
from services.kernel.netlink import BE32, attribute
from services.kernel.nfnetlink import elements, wire
from services.kernel.nfnetlink.sets import header_of
from services.kernel.nfnetlink.values import KINDS
from services.kernel.nftread.sets import head_of, held_elements, held_set
from services.kernel.transaction import Listed

T = "meshmark.x"


def dumped(item: NftSet, **more: int) -> dict[int, bytes]:
    """The attributes of a set's header."""
    kinds = {"flags": (item.interval * 4) | (item.timeout * 16) | (8 if item.value_type else 0)} | more
    key, value = KINDS[item.key_type], KINDS[item.value_type] if item.value_type else None
    found = {1: T.encode() + b"\0", 2: item.name.encode() + b"\0", 3: kinds["flags"], 4: kinds.get("key_type", key.number), 5: key.size}
    if value is not None:
        found |= {6: value.number, 7: value.size * (2 if item.value_interval else 1)}
    return {kind: number if isinstance(number, bytes) else BE32.pack(number) for kind, number in found.items()}


SETS: list[tuple[NftSet, dict[str, str]]] = [
    (NftSet(T, "s", "ipv4_addr"), {"10.0.0.1": "", "255.255.255.255": ""}),
    (NftSet(T, "s", "ipv4_addr", interval=True), {"10.0.0.0/8": "", "11.0.0.0": "", "12.0.0.3-12.0.0.9": "", "224.0.0.0/3": ""}),
    (NftSet(T, "s", "ipv6_addr", interval=True), {"::/1": "", "fd00::1": "", "fe80::/10": ""}),
    (NftSet(T, "s", "inet_service", interval=True), {"80": "", "1024-65535": ""}),
    (NftSet(T, "s", "ifname", interval=True), {"eth0": "", "mo.*": ""}),
    (NftSet(T, "s", "mark"), {"0xff00": "", "0x0": ""}),
    (NftSet(T, "m", "ipv4_addr", "mark"), {"10.0.0.1": "0xfe00"}),
    (NftSet(T, "m", "ipv4_addr", "ipv4_addr", True, True), {"10.61.0.0/16": "10.200.0.0/16", "10.63.0.7": "10.1.1.1"}),
    (NftSet(T, "m", "ifname", "verdict", True), {"lo": "return", "mt.*": "jump from_tunnel"}),
]


@pytest.mark.parametrize("item,members", SETS, ids=lambda value: str(value)[:60])
def test_what_was_written_is_read(item: NftSet, members: dict[str, str]) -> None:
    """A header and its elements, in any order; an equal object of the plan stands for what was read."""
    head = head_of(dumped(item))
    wanted = {found.key: found for found in (NftElement(T, item.name, key, value) for key, value in members.items())}
    lists = [b"".join(reversed(elements.added(header_of(item), list(wanted.values()))))]
    if item.interval:
        lists.append(elements.zero_end(KINDS[item.key_type]))
    found = held_elements(T, head, lists, wanted)
    assert held_set(T, head) == item
    assert found == wanted
    assert all(found[key] is wanted[key] for key in wanted)


def test_what_no_plan_can_have_is_a_difference() -> None:
    """Types and flags that are not known here; elements are numbers then."""
    item = NftSet(T, "s", "ipv4_addr")
    odd = head_of(dumped(item, key_type=9))
    assert held_set(T, odd) == Listed("nft", f"set {T} s", "a set with keys of type 9")
    assert held_set(T, head_of(dumped(item, flags=32))) == Listed("nft", f"set {T} s", "a set with dynamic")
    assert held_set(T, head_of(dumped(item) | {11: bytes(8)})) == Listed("nft", f"set {T} s", "a set with timeout")
    written = elements.added(header_of(item), [NftElement(T, "s", "10.0.0.1")])
    assert held_elements(T, odd, written, {}) == {f"element {T} s 0x0a000001": NftElement(T, "s", "0x0a000001")}


def test_an_element_for_all_other_keys_is_a_star() -> None:
    head = head_of(dumped(NftSet(T, "s", "ipv4_addr")))
    item = attribute(wire.LIST_ITEM, attribute(3, BE32.pack(2)))
    assert held_elements(T, head, [item], {}).keys() == {f"element {T} s *"}
