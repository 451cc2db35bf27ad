"""Marks in rules as the kernel hands them over: native expressions, and what iptables-nft leaves as ``xt``."""

from __future__ import annotations

import struct

import pytest

from services.kernel.netlink import BE32, U32, attribute, text_attribute
from services.kernel.survey.netfilter import decode
from services.kernel.survey.values import Filter, MarkUse

IP, INET, BRIDGE = 2, 1, 7
ALL = 0xFFFFFFFF
MARK_KEY, MARK_REGISTER = 3, 9


def number(kind: int, value: int) -> bytes:
    return attribute(kind, BE32.pack(value))


def data(kind: int, value: int) -> bytes:
    return attribute(kind, attribute(1, U32.pack(value)))


def expression(name: str, *members: bytes) -> bytes:
    return attribute(1, text_attribute(1, name) + attribute(2, b"".join(members)))


def load_mark(register: int = MARK_REGISTER) -> bytes:
    return expression("meta", number(2, MARK_KEY), number(1, register))


def set_mark(register: int = MARK_REGISTER) -> bytes:
    return expression("meta", number(2, MARK_KEY), number(3, register))


def bitwise(mask: int, xor: int) -> bytes:
    return expression("bitwise", number(1, MARK_REGISTER), number(2, MARK_REGISTER), number(3, 4), data(4, mask), data(5, xor))


def compare(value: int) -> bytes:
    return expression("cmp", number(1, MARK_REGISTER), number(2, 0), data(3, value))


def immediate(value: int) -> bytes:
    return expression("immediate", number(1, MARK_REGISTER), data(2, value))


def xt(what: str, name: str, revision: int, info: bytes) -> bytes:
    return expression(what, text_attribute(1, name), number(2, revision), attribute(3, info))


def rule(*expressions: bytes, family: int = IP, table: str = "mangle", chain: str = "C") -> bytes:
    body = text_attribute(1, table) + text_attribute(2, chain) + attribute(4, b"".join(expressions))
    return bytes((family, 0, 0, 0)) + body


@pytest.mark.parametrize(
    "expressions, verb, mask, value",
    [
        ((load_mark(), compare(0xCA6C)), "matches", ALL, 0xCA6C),
        ((load_mark(), bitwise(0x4000, 0), compare(0x4000)), "matches", 0x4000, 0x4000),
        ((load_mark(), expression("lookup", text_attribute(1, "s"), number(2, MARK_REGISTER))), "matches", ALL, None),
        ((load_mark(), expression("range", number(1, MARK_REGISTER))), "matches", ALL, None),
        ((immediate(0x7), set_mark()), "sets", ALL, 0x7),
        ((load_mark(), bitwise(0xFFFF00FF, 0xFE00), set_mark()), "sets", 0xFF00, 0xFE00),
        ((load_mark(), bitwise(ALL, 0x4000), set_mark()), "sets", 0x4000, 0x4000),
        ((expression("ct", number(2, 3), number(1, MARK_REGISTER)), set_mark()), "sets", ALL, None),
        ((load_mark(), expression("hash", number(1, 1), number(2, MARK_REGISTER)), set_mark()), "sets", ALL, None),
        ((xt("match", "mark", 1, struct.pack("=IIB", 0x8000, 0x8000, 0)),), "matches", 0x8000, 0x8000),
        ((xt("target", "MARK", 2, struct.pack("=II", 0x4000, 0x4000)),), "sets", 0x4000, 0x4000),
        ((xt("target", "MARK", 2, struct.pack("=II", 0x80000, 0xFF0000)),), "sets", 0xFF0000, 0x80000),
        ((xt("target", "CONNMARK", 1, struct.pack("=IIIB3x", 0, ALL, 0xFF0000, 2)),), "sets", 0xFF0000, None),
        ((xt("target", "CONNMARK", 1, struct.pack("=IIIB3x", 0, 0xFF0000, ALL, 1)),), "matches", ALL, None),
    ],
)
def test_a_use_of_marks_is_understood(expressions: tuple[bytes, ...], verb: str, mask: int, value: int | None):
    found = decode([], [rule(*expressions)])
    assert found.marks == (MarkUse("ip mangle C", verb, mask, value),)  # type: ignore[arg-type]
    assert found.opaque == ()


@pytest.mark.parametrize(
    "expressions",
    [
        (load_mark(), bitwise(ALL, 0), set_mark()),
        (expression("payload", number(1, MARK_REGISTER)), compare(0x1)),
        (load_mark(), expression("payload", number(1, MARK_REGISTER)), compare(0x1)),
        (load_mark(), expression("counter"), immediate(5), expression("meta", number(2, 2), number(3, MARK_REGISTER))),
        (xt("match", "comment", 0, b"x" * 256),),
        (xt("target", "MASQUERADE", 0, b""),),
    ],
)
def test_what_is_no_use_of_marks_is_none(expressions: tuple[bytes, ...]):
    assert decode([], [rule(*expressions)]).marks == ()


def test_a_target_that_is_not_known_makes_its_table_opaque():
    assert decode([], [rule(xt("target", "TPROXY", 1, b""), table="nat"), rule(immediate(1))]).opaque == ("ip nat",)


def test_the_same_use_is_told_once_and_our_own_tables_never():
    same = rule(immediate(7), set_mark())
    own = rule(immediate(7), set_mark(), family=INET, table="meshmark.rome")
    assert decode([], [same, own, same]).marks == (MarkUse("ip mangle C", "sets", ALL, 7),)
    # The name alone is not enough: what is ours is in family inet.
    assert len(decode([], [rule(immediate(7), set_mark(), table="meshmark.rome")]).marks) == 1


def chain(family: int = IP, table: str = "filter", hook: int = 2, policy: int = 0) -> bytes:
    body = text_attribute(1, table) + text_attribute(3, "FORWARD") + attribute(4, number(1, hook) + number(2, 0)) + number(5, policy)
    return bytes((family, 0, 0, 0)) + body


@pytest.mark.parametrize(
    "body, found",
    [
        (chain(), (Filter("ip", "filter", "FORWARD"),)),
        (chain(family=INET), (Filter("inet", "filter", "FORWARD"),)),
        (chain(policy=1), ()),
        (chain(hook=1), ()),
        (chain(family=BRIDGE), ()),
        (chain(family=INET, table="meshmark.rome"), ()),
        (bytes((IP, 0, 0, 0)) + text_attribute(1, "filter") + text_attribute(3, "plain"), ()),
    ],
)
def test_chains_that_drop_what_is_forwarded(body: bytes, found: tuple[Filter, ...]):
    assert decode([body], []).drops == found
