"""Rules as text for people, much as nft lists them: what a form (``rules``) says, expression by expression.

Owns nothing. Each register is followed to what was loaded into it. What is not known here, an expression of a newer kernel or an attribute
of a known one, is shown by its name and its bytes: no difference between two forms is lost, and nothing is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from services.kernel.netlink import Attributes, attributes, each_attribute, text_of
from services.kernel.nftread import nameless
from services.kernel.nftread.counted import comment_of
from services.kernel.nftread.operands import (
    Operand,
    ct_name,
    ct_operand,
    fib_operand,
    meta_name,
    meta_operand,
    payload_operand,
)
from services.kernel.nftread.rules import ANONYMOUS, DATA, EXPRESSIONS, NAME, USERDATA
from services.kernel.nftread.sets import hexadecimal, verdict_text

_UNREADABLE = (ValueError, LookupError, ArithmeticError, OSError, struct.error)
_VERDICT_REGISTER = 0
_VALUE, _VERDICT = 1, 2
_OPERATORS = {0: "==", 1: "!=", 2: "<", 3: "<=", 4: ">", 5: ">="}
_NAT_KINDS = {0: "snat", 1: "dnat"}
_FAMILIES = {2: "ip", 10: "ip6"}
_NETMAP = 64
_NAT_FLAGS = {4: "random", 8: "fully-random", 16: "persistent"}
_UNITS = {1: "second", 60: "minute", 3600: "hour", 86400: "day", 604800: "week"}
_REJECTS = {0: "icmp", 1: "tcp", 2: "icmpx"}
_RT_TCPMSS = 3
_MAXSEG = (2, 2, 2, 1)


def rule_text(rule: str | bytes) -> str:
    """A rule of a ``ListedChain``. One that was listed as text is that text."""
    if isinstance(rule, str):
        return rule
    found = attributes(rule)
    words = _Words([data for kind, data in each_attribute(rule) if kind == ANONYMOUS])
    parts = [words.said(expression) for _, expression in each_attribute(found.get(EXPRESSIONS, b""))]
    if comment := comment_of(found.get(USERDATA, b"")):
        parts.append(f'comment "{comment}"')
    return " ".join(part for part in parts if part)


class _Parts:
    """An expression's attributes; `left` are those that nobody has asked for."""

    def __init__(self, data: bytes) -> None:
        self._found = attributes(data)
        self.left: Attributes = dict(self._found)

    def has(self, kind: int) -> bool:
        return kind in self._found

    def data(self, kind: int) -> bytes:
        self.left.pop(kind, None)
        return self._found.get(kind, b"")

    def number(self, kind: int) -> int:
        return int.from_bytes(self.data(kind))

    def text(self, kind: int) -> str:
        return text_of(self.data(kind))

    def value(self, kind: int) -> bytes:
        return attributes(self.data(kind)).get(_VALUE, b"")


class _Words:
    """Says the expressions of one rule, one after the other. `contents` are its sets without names, in order."""

    def __init__(self, contents: list[bytes]) -> None:
        self._contents = contents
        self._registers: dict[int, Operand] = {}
        self._transport = ""

    def said(self, expression: bytes) -> str:
        """The words of an expression; empty for one that only prepares the next."""
        found = attributes(expression)
        name, data = text_of(found.get(NAME, b"")), found.get(DATA, b"")
        say = _SAYINGS.get(name)
        if say is None:
            return f"[{name} {hexadecimal(data)}]" if data else f"[{name}]"
        parts = _Parts(data)
        try:
            text = say(self, parts)
        except _UNREADABLE:  # a value of another length than what it is compared with, as in concatenations
            return f"[{name} {hexadecimal(data)}]"
        more = "".join(f" [{name} {kind}: {hexadecimal(value)}]" for kind, value in sorted(parts.left.items()) if any(value))
        return f"{text}{more}".lstrip()

    def _operand(self, register: int) -> Operand:
        return self._registers.get(register) or Operand(f"register {register}", hexadecimal)

    def load(self, register: int, operand: Operand) -> str:
        self._registers[register] = operand
        return ""

    def payload(self, parts: _Parts) -> str:
        base, offset, length = parts.number(2), parts.number(3), parts.number(4)
        operand = payload_operand(base, offset, length, self._transport)
        if parts.has(5):
            return f"{operand.text} set {self._operand(parts.number(5)).text}"
        return self.load(parts.number(1), operand)

    def meta(self, parts: _Parts) -> str:
        key = parts.number(2)
        if parts.has(3):
            return f"{meta_name(key)} set {self._written(parts.number(3), meta_operand(key))}"
        return self.load(parts.number(1), meta_operand(key))

    def ct(self, parts: _Parts) -> str:
        key = parts.number(2)
        if parts.has(4):
            return f"{ct_name(key)} set {self._written(parts.number(4), ct_operand(key))}"
        direction = {0: " original", 1: " reply"}.get(parts.number(3), "") if parts.has(3) else ""
        return self.load(parts.number(1), ct_operand(key, direction))

    def _written(self, register: int, to: Operand) -> str:
        """What goes from a register to somewhere; a constant in the words for that place."""
        operand = self._operand(register)
        return to.read(operand.constant) if operand.constant else operand.text

    def fib(self, parts: _Parts) -> str:
        return self.load(parts.number(1), fib_operand(parts.number(2), parts.number(3)))

    def rt(self, parts: _Parts) -> str:
        key = parts.number(2)
        return self.load(parts.number(1), Operand("rt mtu" if key == _RT_TCPMSS else f"rt {key}", hexadecimal))

    def bitwise(self, parts: _Parts) -> str:
        operand = self._operand(parts.number(1))
        register, _ = parts.number(2), parts.number(3)
        mask, xor = parts.value(4), parts.value(5)
        # A register that holds (a & mask) ^ xor, where xor has no bit of the mask, holds a & mask | xor.
        sign = "|" if not any(one & other for one, other in zip(mask, xor, strict=False)) else "^"
        more = f" {sign} {operand.read(xor)}" if any(xor) else ""
        if operand.kind is not None and not more and (length := _prefix_length(mask)) is not None:
            return self.load(register, operand._replace(read=lambda data: f"{operand.read(data)}/{length}"))
        tested = f"{operand.text} {operand.read(mask)}" if operand.bits and not more else ""
        return self.load(register, operand._replace(text=f"{operand.text} & {operand.read(mask)}{more}", tested=tested))

    def byteorder(self, parts: _Parts) -> str:
        for kind in (3, 4, 5):
            parts.number(kind)
        operand = self._operand(parts.number(1))
        swapped = operand if operand.kind else operand._replace(read=lambda data: operand.read(data[::-1]))
        return self.load(parts.number(2), swapped)

    def cmp(self, parts: _Parts) -> str:
        operand = self._operand(parts.number(1))
        operator, value = _OPERATORS.get(parts.number(2), "?"), parts.value(3)
        if operator == "!=" and operand.tested and not any(value):
            return operand.tested
        text = operand.say(value) if value else ""
        if operand.text.endswith("name") and value and not value.endswith(b"\0"):
            text = f"{text_of(value)}*"
        if operand.text == "meta l4proto" and operator == "==":
            self._transport = text
        return f"{operand.text} {text}" if operator == "==" else f"{operand.text} {operator} {text}"

    def range(self, parts: _Parts) -> str:
        operand = self._operand(parts.number(1))
        operator = "!= " if parts.number(2) else ""
        return f"{operand.text} {operator}{operand.span(parts.value(3), parts.value(4))}"

    def lookup(self, parts: _Parts) -> str:
        operand = self._operand(parts.number(2))
        name = f"@{parts.text(1)}"
        if name == "@__set" and self._contents:
            name = f"{{ {', '.join(_members(operand, self._contents.pop(0)))} }}"
        if parts.has(3):
            register = parts.number(3)
            if register == _VERDICT_REGISTER:
                return f"{operand.text} vmap {name}"
            return self.load(register, Operand(f"{operand.text} map {name}", hexadecimal))
        return f"{operand.text} {'!= ' if parts.number(5) & 1 else ''}{name}"

    def immediate(self, parts: _Parts) -> str:
        register = parts.number(1)
        data = attributes(parts.data(2))
        if _VERDICT in data:
            return verdict_text(data[_VERDICT])
        value = data.get(_VALUE, b"")
        return self.load(register, Operand(hexadecimal(value), hexadecimal, constant=value))

    def nat(self, parts: _Parts) -> str:
        kind, family, flags = _NAT_KINDS.get(parts.number(1), "nat"), _FAMILIES.get(parts.number(2), "inet"), parts.number(7)
        target = ""
        if parts.has(3):
            low, high = parts.number(3), parts.number(4)
            target = self._address(low, family)
            if high != low and high in self._registers:
                target += f"-{self._address(high, family)}"
        if parts.has(5):
            port, last = parts.number(5), parts.number(6)
            target += f":{self._port(port)}" + (f"-{self._port(last)}" if last not in (0, port) else "")
        words = [kind, family, "prefix" if flags & _NETMAP else "", f"to {target}" if target else ""]
        return " ".join(word for word in (*words, *(word for flag, word in _NAT_FLAGS.items() if flags & flag)) if word)

    def _address(self, register: int, family: str) -> str:
        return self._written(register, payload_operand(1, *((12, 4) if family == "ip" else (8, 16)), ""))

    def _port(self, register: int) -> str:
        return self._written(register, payload_operand(2, 0, 2, ""))

    def masq(self, parts: _Parts) -> str:
        flags = parts.number(1)
        return " ".join(["masquerade", *(word for flag, word in _NAT_FLAGS.items() if flags & flag)])

    def reject(self, parts: _Parts) -> str:
        kind, code = _REJECTS.get(parts.number(1), "?"), parts.number(2)
        return "reject with tcp reset" if kind == "tcp" else f"reject with {kind} code {code}"

    def exthdr(self, parts: _Parts) -> str:
        where = parts.number(2), parts.number(3), parts.number(4), parts.number(6)
        name = "tcp option maxseg size" if where == _MAXSEG else f"header {where[3]} {where[0]},{where[1] * 8},{where[2] * 8}"
        if parts.has(7):
            return f"{name} set {self._port(parts.number(7))}"
        return self.load(parts.number(1), Operand(name, hexadecimal))

    def limit(self, parts: _Parts) -> str:
        unit = parts.number(2)
        over = "over " if parts.number(5) & 1 else ""
        what = "bytes/" if parts.number(4) else "/"
        return f"limit rate {over}{parts.number(1)}{what}{_UNITS.get(unit, unit)} burst {parts.number(3)}"

    def log(self, parts: _Parts) -> str:
        words = ["log"] + ([f'prefix "{parts.text(2)}"'] if parts.has(2) else [])
        words += [f"{word} {parts.number(kind)}" for kind, word in ((1, "group"), (3, "snaplen")) if parts.has(kind)]
        return " ".join(words)

    def counter(self, parts: _Parts) -> str:
        parts.left.clear()
        return "counter"


def _prefix_length(mask: bytes) -> int | None:
    """The length of the prefix that a mask leaves; None for a mask that leaves something else."""
    number, bits = int.from_bytes(mask), 8 * len(mask)
    length = number.bit_count()
    return length if number == (1 << bits) - (1 << bits - length) else None


def _members(operand: Operand, content: bytes) -> list[str]:
    """What is in a set, in the words for what is looked up."""
    return [f"{key} : {value}" if value else key for key, value in nameless.members(content, operand.say)]


_SAYINGS: dict[str, Callable[[_Words, _Parts], str]] = {
    "payload": _Words.payload,
    "meta": _Words.meta,
    "ct": _Words.ct,
    "fib": _Words.fib,
    "rt": _Words.rt,
    "bitwise": _Words.bitwise,
    "byteorder": _Words.byteorder,
    "cmp": _Words.cmp,
    "range": _Words.range,
    "lookup": _Words.lookup,
    "immediate": _Words.immediate,
    "nat": _Words.nat,
    "masq": _Words.masq,
    "reject": _Words.reject,
    "exthdr": _Words.exthdr,
    "limit": _Words.limit,
    "log": _Words.log,
    "counter": _Words.counter,
    "notrack": lambda _words, _parts: "notrack",
}
