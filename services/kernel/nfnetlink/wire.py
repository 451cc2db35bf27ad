"""Messages and attributes of nfnetlink as bytes, and the numbers that the kernel's headers give them.

Owns nothing. Names are those of linux/netfilter/nf_tables.h without NFT and NFTA, where they are not our own words.
"""

from __future__ import annotations

from enum import IntEnum

from services.kernel.netlink import BE32, BE64, HEADER, attribute, message, text_attribute

SUBSYSTEM = 10 << 8
FAMILY_INET = 1
BATCH_BEGIN, BATCH_END = 16, 17
BATCH_GENERATION = 1
REQUEST, ECHO, CREATE, APPEND = 0x1, 0x8, 0x400, 0x800
NESTED = 0x8000
_RESOURCE = bytes((0, 0, 0, 10))  # nfgenmsg of a batch's ends: which subsystem it is for
_INET = bytes((FAMILY_INET, 0, 0, 0))


class Message(IntEnum):
    """Kinds of messages."""

    NEW_TABLE = 0
    DEL_TABLE = 2
    NEW_CHAIN = 3
    DEL_CHAIN = 5
    NEW_RULE = 6
    GET_RULE = 7
    DEL_RULE = 8
    NEW_SET = 9
    GET_SET = 10
    DEL_SET = 11
    NEW_ELEMENTS = 12
    GET_ELEMENTS = 13
    DEL_ELEMENTS = 14
    NEW_GENERATION = 15
    GET_GENERATION = 16


TABLE_NAME, TABLE_FLAGS = 1, 2
CHAIN_TABLE, CHAIN_NAME, CHAIN_HOOK, CHAIN_POLICY, CHAIN_TYPE = 1, 3, 4, 5, 7
HOOK_NUMBER, HOOK_PRIORITY = 1, 2
RULE_TABLE, RULE_CHAIN, RULE_HANDLE, RULE_EXPRESSIONS, RULE_POSITION, RULE_USERDATA = 1, 2, 3, 4, 6, 7
SET_TABLE, SET_NAME, SET_FLAGS, SET_KEY_TYPE, SET_KEY_LENGTH, SET_DATA_TYPE, SET_DATA_LENGTH = 1, 2, 3, 4, 5, 6, 7
SET_DESCRIPTION, SET_ID, SET_USERDATA = 9, 10, 13
DESCRIPTION_SIZE = 1
ELEMENTS_TABLE, ELEMENTS_SET, ELEMENTS_LIST, ELEMENTS_SET_ID = 1, 2, 3, 4
ELEMENT_KEY, ELEMENT_DATA, ELEMENT_FLAGS, ELEMENT_TIMEOUT, ELEMENT_USERDATA = 1, 2, 3, 4, 6
LIST_ITEM = 1
DATA_VALUE, DATA_VERDICT = 1, 2
VERDICT_CODE, VERDICT_CHAIN = 1, 2
EXPRESSION_NAME, EXPRESSION_DATA = 1, 2


class SetFlag(IntEnum):
    """Flags of sets."""

    ANONYMOUS = 1
    CONSTANT = 2
    INTERVAL = 4
    MAP = 8
    TIMEOUT = 16


VERDICTS = {"drop": 0, "accept": 1, "return": -5 & 0xFFFFFFFF, "jump": -3 & 0xFFFFFFFF}


def be32(kind: int, number: int) -> bytes:
    """An attribute of a number in the network's order, as nftables has nearly all."""
    return attribute(kind, BE32.pack(number & 0xFFFFFFFF))


def be64(kind: int, number: int) -> bytes:
    return attribute(kind, BE64.pack(number))


def nest(kind: int, *parts: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(parts))


def nested(kind: int) -> int:
    """The kind of an attribute that holds attributes."""
    return kind | NESTED


def text(kind: int, value: str) -> bytes:
    return text_attribute(kind, value)


def request(kind: Message, flags: int, sequence: int, *parts: bytes) -> bytes:
    """A message about family inet."""
    return message(SUBSYSTEM | kind, _INET + b"".join(parts), REQUEST | flags, sequence)


def preamble(kind: Message, flags: int, length: int) -> bytes:
    """The first 8 bytes of a message with `length` bytes after its header; its sequence number comes next, then ``ROUTING``."""
    return HEADER.pack(HEADER.size + length, SUBSYSTEM | kind, REQUEST | flags, 0, 0)[:8]


ROUTING = bytes(4) + _INET
"""What follows the sequence number: the sender, whom the kernel fills in, and the family."""


def begin(sequence: int, generation: int | None) -> bytes:
    """The start of a batch; with `generation` the kernel refuses it when its generation is another one."""
    expected = be32(BATCH_GENERATION, generation) if generation is not None else b""
    return message(BATCH_BEGIN, _RESOURCE + expected, REQUEST, sequence)


def end(sequence: int) -> bytes:
    return message(BATCH_END, _RESOURCE, REQUEST, sequence)


def verdict(code: str, chain: str = "") -> bytes:
    """A verdict as the value of an immediate or of a map's element. KeyError for one that there is not."""
    to = text(VERDICT_CHAIN, chain) if chain else b""
    return nest(DATA_VERDICT, be32(VERDICT_CODE, VERDICTS[code]), to)
