"""What the kernel of the calling thread's namespace holds of nftables, as bytes that two kernels can be compared by.

What the kernel gives by itself (handles, positions, identities of sets, names of anonymous sets) is left out; elements have no
order. An end before all values, with which libnftables begins interval sets that it sees to be empty, says nothing and is left out too.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

from services.kernel.netlink import NETLINK_NETFILTER, NetlinkSocket, attribute, attributes, text_of

_NFT = 10 << 8
_INET = bytes((1, 0, 0, 0))
_GET_CHAIN, _GET_RULE, _GET_SET, _GET_ELEMENTS = 4, 7, 10, 13
_GIVEN_TO_SETS = (10, 16, 19, 20)  # identity, handle, the kernel's choice of structure and count
_GIVEN_TO_CHAINS = (2, 6)  # handle, number of users


class Rule(NamedTuple):
    """A rule as its expressions; what it looks up by an anonymous set stands in it whole."""

    table: str
    chain: str
    expressions: tuple[object, ...]
    comment: bytes


class Dump(NamedTuple):
    """All that there is."""

    sets: tuple[object, ...]
    chains: tuple[object, ...]
    rules: tuple[Rule, ...]


def dump() -> Dump:
    with contextlib.closing(NetlinkSocket(NETLINK_NETFILTER)) as asked:
        found: dict[tuple[bytes, bytes], object] = {}
        for body in asked.dump(_NFT | _GET_SET, _INET):
            if body:
                named = attributes(body, 4)
                found[named[1], named[2]] = _set(asked, named)
        chains = [attributes(body, 4) for body in asked.dump(_NFT | _GET_CHAIN, _INET) if body]
        rules = [attributes(body, 4) for body in asked.dump(_NFT | _GET_RULE, _INET) if body]
    return Dump(
        tuple(sorted((item for (_, name), item in found.items() if not _is_anonymous(name)), key=repr)),
        tuple(sorted(tuple((kind, value) for kind, value in sorted(item.items()) if kind not in _GIVEN_TO_CHAINS) for item in chains)),
        tuple(_rule(item, found) for item in rules),
    )


def _set(asked: NetlinkSocket, named: dict[int, bytes]) -> object:
    members = []
    for body in asked.dump(_NFT | _GET_ELEMENTS, _INET + attribute(1, named[1]) + attribute(2, named[2])):
        if body:
            found = [attributes(item) for _, item in _list(attributes(body, 4).get(3, b""))]
            members += [tuple(sorted(item.items())) for item in found if not _is_end_at_zero(item)]
    known = [(kind, value) for kind, value in sorted(named.items()) if kind not in _GIVEN_TO_SETS]
    return tuple(known if not _is_anonymous(named[2]) else [item for item in known if item[0] != 2]), tuple(sorted(members))


def _rule(item: dict[int, bytes], sets: dict[tuple[bytes, bytes], object]) -> Rule:
    found = []
    for _, body in _list(item.get(4, b"")):
        parts = attributes(body)
        name, inside = text_of(parts[1]), parts.get(2, b"")
        if name == "lookup" and _is_anonymous(attributes(inside)[1]):
            looked = attributes(inside)
            found.append((name, sets[item[1], looked.pop(1)], tuple(sorted(looked.items()))))
        else:
            found.append((name, inside))
    return Rule(text_of(item[1]), text_of(item[2]), tuple(found), item.get(7, b""))


def _list(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        found.append((kind & 0x3FFF, data[at + 4 : at + length]))
        at += (length + 3) & ~3
    return found


def _is_anonymous(name: bytes) -> bool:
    return name.startswith(b"__set")


def _is_end_at_zero(item: dict[int, bytes]) -> bool:
    return 3 in item and not any(attributes(item[1])[1])
