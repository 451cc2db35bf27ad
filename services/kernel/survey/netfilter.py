"""What other people's nftables rules do with packet marks, and which of their chains drop what they do not accept.

Read as netlink messages and not as nft text: text loses what iptables-nft wrote (``xt`` matches and targets) where nft has no plugins for
it. A rule is followed through the kernel's registers, from where it loads the mark to where it compares or sets it. What is not understood
makes its table `opaque`, and is not taken for nothing. Raises NetlinkError where the tables may not be read.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

from schemas.host_objects import OWN_TABLE_PREFIX
from services.kernel.netlink import BE32, NETLINK_NETFILTER, Attributes, NetlinkSocket, attributes, text_of
from services.kernel.survey.values import Filter, MarkUse, Netfilter

_GET_CHAIN, _GET_RULE, _GET_GENERATION = 10 << 8 | 4, 10 << 8 | 7, 10 << 8 | 16  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GET…
_GENERATION_ID = 1
_HEADER = 4  # nfgenmsg: family, version, resource
_INET, _FORWARD, _DROP = 1, 2, 0
_FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
_FORWARDING = ("inet", "ip", "ip6")
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY = 1, 3, 4, 5
_RULE_TABLE, _RULE_CHAIN, _RULE_EXPRESSIONS = 1, 2, 4
_ALL = 0xFFFFFFFF
_META_MARK = 3
_RESTORE, _SAVE = 2, 1  # modes of xt_connmark
_PURE = frozenset(
    ("counter", "limit", "quota", "log", "reject", "masq", "redir", "nat", "notrack", "objref", "tproxy", "queue", "synproxy", "last")
)
"""Expressions that change no register and no mark."""
_LOADING = frozenset(("payload", "exthdr", "fib", "rt", "socket", "numgen", "tunnel", "xfrm", "osf"))
"""Expressions that load something else into the register of their first attribute."""
_HARMLESS_TARGETS = frozenset(("ACCEPT", "DROP", "REJECT", "LOG", "NFLOG", "MASQUERADE", "DNAT", "SNAT", "REDIRECT", "NETMAP", "TCPMSS"))


class _Value(Struct, frozen=True):
    """What a register holds: ``(mark & mask) ^ xor``. A mask of 0 is a constant; `is_known` False: something else altogether."""

    mask: int = 0
    xor: int = 0
    is_known: bool = True


_OTHER = _Value(is_known=False)


def read() -> Netfilter:
    """Marks and forwarding in all tables but ours, of every family."""
    with contextlib.closing(NetlinkSocket(NETLINK_NETFILTER)) as netlink:
        chains = netlink.dump(_GET_CHAIN, bytes(_HEADER))
        rules = netlink.dump(_GET_RULE, bytes(_HEADER))
    return decode(chains, rules)


def generation() -> int:
    """A number that every change of any table makes another one. Raises NetlinkError where it may not be read."""
    with contextlib.closing(NetlinkSocket(NETLINK_NETFILTER)) as netlink:
        answers = netlink.ask(_GET_GENERATION, bytes(_HEADER))
    return next(_number(attributes(body, _HEADER)[_GENERATION_ID]) for body in answers)


def decode(chains: Iterable[bytes], rules: Iterable[bytes]) -> Netfilter:
    """The same from the messages' bodies."""
    marks: dict[MarkUse, None] = {}
    opaque: dict[str, None] = {}
    for body in rules:
        found = attributes(body, _HEADER)
        if not body or _is_own(body[0], found.get(_RULE_TABLE, b"")):
            continue
        table = f"{_family(body[0])} {text_of(found[_RULE_TABLE])}"
        follower = _Follower(f"{table} {text_of(found[_RULE_CHAIN])}")
        follower.follow(found.get(_RULE_EXPRESSIONS, b""))
        marks |= dict.fromkeys(follower.uses)
        if follower.is_opaque:
            opaque[table] = None
    drops = [drop for body in chains if body and (drop := _drop(body)) is not None]
    return Netfilter(tuple(marks), tuple(drops), tuple(opaque))


def _drop(body: bytes) -> Filter | None:
    found = attributes(body, _HEADER)
    hook = attributes(found.get(_CHAIN_HOOK, b""))
    drops = _CHAIN_POLICY in found and BE32.unpack(found[_CHAIN_POLICY])[0] == _DROP
    family = _family(body[0])
    if not drops or not hook or BE32.unpack(hook[1])[0] != _FORWARD or family not in _FORWARDING or _is_own(body[0], found[_CHAIN_TABLE]):
        return None
    return Filter(family, text_of(found[_CHAIN_TABLE]), text_of(found[_CHAIN_NAME]))


def _is_own(family: int, table: bytes) -> bool:
    return family == _INET and text_of(table).startswith(OWN_TABLE_PREFIX)


def _family(number: int) -> str:
    return _FAMILIES.get(number, str(number))


class _Follower:
    """Follows one rule's expressions through the registers."""

    def __init__(self, where: str) -> None:
        self.uses: list[MarkUse] = []
        self.is_opaque = False
        self._where = where
        self._registers: dict[int, _Value] = {}

    def follow(self, expressions: bytes) -> None:
        for element in _elements(expressions):
            found = attributes(element)
            name, data = text_of(found.get(1, b"")), attributes(found.get(2, b""))
            step = getattr(self, f"_{name}", None)
            if step is not None:
                step(data)
            elif name in _LOADING:
                self._put(data.get(1, b""), _OTHER)
            elif name not in _PURE:
                self._registers.clear()

    def _meta(self, data: Attributes) -> None:
        is_mark = _number(data.get(2, b"")) == _META_MARK
        if 3 in data:  # noqa: PLR2004 - NFTA_META_SREG: it sets
            if is_mark:
                self._set(self._registers.get(_number(data[3]), _OTHER))
        else:
            self._put(data.get(1, b""), _Value(_ALL) if is_mark else _OTHER)

    def _ct(self, data: Attributes) -> None:
        self._put(data.get(1, b""), _OTHER)

    def _immediate(self, data: Attributes) -> None:
        raw = attributes(data.get(2, b"")).get(1, b"")
        self._put(data.get(1, b""), _Value(0, _host(raw)) if len(raw) == 4 else _OTHER)  # noqa: PLR2004 - a mark's size

    def _bitwise(self, data: Attributes) -> None:
        held = self._registers.get(_number(data.get(1, b"")), _OTHER)
        mask, xor = (attributes(data.get(kind, b"")).get(1, b"") for kind in (4, 5))
        if not held.is_known or not mask or not xor:
            self._put(data.get(2, b""), _OTHER)
            return
        self._put(data.get(2, b""), _Value(held.mask & _host(mask), (held.xor & _host(mask)) ^ _host(xor)))

    def _cmp(self, data: Attributes) -> None:
        held = self._registers.get(_number(data.get(1, b"")), _OTHER)
        if held.is_known and held.mask:
            self._use("matches", held.mask, _host(attributes(data.get(3, b"")).get(1, b"")) ^ held.xor)

    def _range(self, data: Attributes) -> None:
        self._looked_at(data.get(1, b""))

    def _lookup(self, data: Attributes) -> None:
        self._looked_at(data.get(2, b""))
        self._put(data.get(3, b""), _OTHER)

    def _match(self, data: Attributes) -> None:
        """An iptables match: ``mark`` of revision 1 is mark, mask and whether it is inverted."""
        name, info = text_of(data.get(1, b"")), data.get(3, b"")
        if name == "mark" and len(info) >= 8:  # noqa: PLR2004
            value, mask = struct.unpack_from("=II", info)
            self._use("matches", mask, value)

    def _target(self, data: Attributes) -> None:
        """An iptables target: ``MARK`` of revision 2 is mark and mask; ``CONNMARK`` may restore the mark or save it."""
        name, info = text_of(data.get(1, b"")), data.get(3, b"")
        if name == "MARK" and len(info) >= 8:  # noqa: PLR2004
            value, mask = struct.unpack_from("=II", info)
            self._use("sets", mask | value, value)
        elif name == "CONNMARK" and len(info) >= 13:  # noqa: PLR2004
            _, ct_mask, mask, mode = struct.unpack_from("=IIIB", info)
            if mode == _RESTORE:
                self._use("sets", mask, None)
            elif mode == _SAVE:
                self._use("matches", mask or ct_mask, None)
        elif name not in _HARMLESS_TARGETS:
            self.is_opaque = True

    def _looked_at(self, register: bytes) -> None:
        held = self._registers.get(_number(register), _OTHER)
        if held.is_known and held.mask:
            self._use("matches", held.mask, None)

    def _set(self, value: _Value) -> None:
        if not value.is_known:
            self._use("sets", _ALL, None)
        else:
            # Bits that are kept and not turned over stay what they were.
            self._use("sets", (~value.mask | value.xor) & _ALL, value.xor)

    def _use(self, verb: Literal["matches", "sets"], mask: int, value: int | None) -> None:
        if mask:
            self.uses.append(MarkUse(self._where, verb, mask, value))

    def _put(self, register: bytes, value: _Value) -> None:
        if len(register) == BE32.size:
            self._registers[_number(register)] = value


def _elements(data: bytes) -> Iterator[bytes]:
    """The values of a list's attributes, which are all of one kind."""
    offset = 0
    while offset + 4 <= len(data):
        length, _ = struct.unpack_from("=HH", data, offset)
        if length < 4:  # noqa: PLR2004 - an attribute's header
            return
        yield data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _host(data: bytes) -> int:
    """Marks are in the host's order, unlike other numbers of nftables."""
    return int.from_bytes(data, sys.byteorder)
