"""What rules of one form are in the kernel: their expressions, with holes for the values that differ.

Owns the templates of one engine, at most a few thousand, which depend on forms alone. What a form means as expressions is that of nft
1.0.6, so that both engines' rules are the same in a dump. Two equal ports are joined into one comparison, as there, but only side by side;
``nft.statements`` keeps libnftables from joining others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from schemas.nft import Rule
from services.kernel.nfnetlink import expressions as made
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.expressions import EQUAL, OPERATORS, REGISTER, SECOND, UNEQUAL, Piece, Pieces
from services.kernel.nfnetlink.forms import Form, Forms, Said
from services.kernel.nfnetlink.selectors import SELECTORS, Field
from services.kernel.nfnetlink.sets import ANONYMOUS
from services.kernel.nfnetlink.values import IPV4_ADDRESS, IPV6_ADDRESS, MARK, PORT, Inexpressible

_KEPT = 4096
_FAMILIES = {"ip": (2, IPV4_ADDRESS), "ip6": (10, IPV6_ADDRESS), 4: (2, IPV4_ADDRESS), 6: (10, IPV6_ADDRESS)}
_SOURCE, _DESTINATION = 0, 1
_MATCHES = frozenset(("lookup", "literal", "range", "stem", "plain", "set", "masked set", "masked", "short", "bits"))
WITH_SETS = frozenset(("set", "masked set"))
_SET_ID_BYTES = 4


class Template(NamedTuple):
    """A rule's expressions and comment as literals with a hole between each two; `order` says which value fills which hole."""

    literals: tuple[bytes, ...]
    length: int
    order: tuple[int, ...] | None


class _Known:
    """What a rule has made sure of so far: the packet's family and its protocol. `odd` is what was looked at in a way that says less."""

    def __init__(self) -> None:
        self.network = 0
        self.transport = 0
        self.odd: set[str] = set()

    def require(self, field: Field) -> Pieces:
        """What must come before a field can be loaded."""
        found: Pieces = ()
        for name, wanted, key in (
            ("network", field.network, made.META_NFPROTO),
            ("transport", field.transport, made.META_L4PROTO),
        ):
            if not wanted or getattr(self, name) == wanted:
                continue
            if getattr(self, name) or name in self.odd:
                raise Inexpressible(field.place, "a field of a header that the rule excludes")
            setattr(self, name, wanted)
            found += made.load_meta(key) + made.compare(EQUAL, bytes((wanted,)))
        return found


class Templates:
    """The templates of all forms that were met, and what takes rules apart into these."""

    def __init__(self) -> None:
        self.forms = Forms()
        self._found: dict[tuple[Form, ...], Template] = {}

    def of(self, forms: tuple[Form, ...], rule: Rule) -> Template:
        """The template of a rule with these forms. Raises Inexpressible."""
        found = self._found.get(forms)
        if found is None:
            if len(self._found) >= _KEPT:
                self._found.clear()
            found = self._found[forms] = _template(forms, [len(self.forms.of(item)[1]) for item in rule])
        return found


def _template(forms: tuple[Form, ...], counts: Sequence[int]) -> Template:
    """`counts` says how many holes each form has."""
    known = _Known()
    pieces: list[Piece] = []
    comment: Pieces = ()
    order: list[int] = []
    ends = list(itertools.accumulate(counts))
    numbered = [((form.kind, *form.says), tuple(range(end - count, end))) for form, count, end in zip(forms, counts, ends, strict=True)]
    for (kind, *says), places in _joined(numbered):
        if kind == "comment":
            comment = made.holder(wire.RULE_USERDATA, (bytes((0, says[0] + 1)), says[0], b"\0"))
        else:
            pieces += _ENCODERS[kind](known, *says)
        order += places
    return _filled((*made.holder(wire.nested(wire.RULE_EXPRESSIONS), pieces), *comment), order)


def _filled(pieces: Pieces, order: list[int]) -> Template:
    literals = [b""]
    for piece in pieces:
        if isinstance(piece, int):
            literals.append(b"")
        else:
            literals[-1] += piece
    return Template(tuple(literals), made.size(pieces), None if order == sorted(order) else tuple(order))


def _joined(forms: list[tuple[Said, tuple[int, ...]]]) -> list[tuple[Said, tuple[int, ...]]]:
    """Two equal ports of one header, side by side, as one comparison of both."""
    ports = [place for place, (form, _) in enumerate(forms) if form[0] in _MATCHES and form[1].endswith(("sport", "dport"))]
    if len(ports) != 2 or ports[0] + 1 != ports[1]:  # noqa: PLR2004 - a source and a destination
        return forms
    (first, first_hole), (second, second_hole) = forms[ports[0]], forms[ports[1]]
    header, _, end = first[1].partition(" ")
    is_pair = first == ("plain", first[1], "==") and second == ("plain", f"{header} {'dport' if end == 'sport' else 'sport'}", "==")
    if not is_pair:
        return forms
    holes = first_hole + second_hole if end == "sport" else second_hole + first_hole
    return [*forms[: ports[0]], (("ports", f"{header} sport"), holes), *forms[ports[1] + 1 :]]


def _loaded(known: _Known, selector: str) -> tuple[Field, Pieces]:
    field = SELECTORS[selector]  # type: ignore[index]
    return field, known.require(field) + field.load


def _plain(known: _Known, selector: str, operator: str) -> Pieces:
    field, load = _loaded(known, selector)
    size = field.kind.size
    if field.mask:
        return load + made.bitwise(size, bytes((field.mask,)), bytes(size)) + made.compare(OPERATORS[operator], size)
    if field.bits and operator == "==":
        return load + made.bitwise(size, size, bytes(size)) + made.compare(UNEQUAL, bytes(size))
    return load + made.compare(OPERATORS[operator], size)


def _literal(known: _Known, selector: str, operator: str, value: bytes) -> Pieces:
    name = "network" if selector == "meta nfproto" else "transport"
    if operator == "==" and getattr(known, name) in (0, value[0]):
        setattr(known, name, value[0])
    else:
        known.odd.add(name)
    return SELECTORS[selector].load + made.compare(OPERATORS[operator], value)  # type: ignore[index]


def _ports(known: _Known, selector: str) -> Pieces:
    field = SELECTORS[selector]  # type: ignore[index]
    assert field.place is not None
    return known.require(field) + made.load_payload(*field.place, 2 * PORT.size) + made.compare(EQUAL, PORT.size, PORT.size)


def _masked(known: _Known, selector: str, operator: str) -> Pieces:
    _, load = _loaded(known, selector)
    return load + made.bitwise(MARK.size, MARK.size, bytes(MARK.size)) + made.compare(OPERATORS[operator], MARK.size)


def _short(known: _Known, selector: str, operator: str, length: int) -> Pieces:
    field = SELECTORS[selector]  # type: ignore[index]
    assert field.place is not None
    return known.require(field) + made.load_payload(*field.place, length) + made.compare(OPERATORS[operator], length)


def _bits(known: _Known, selector: str, operator: str, length: int) -> Pieces:
    field, load = _loaded(known, selector)
    kind = field.kind
    mask = (kind.last >> kind.size * 8 - length << kind.size * 8 - length).to_bytes(kind.size, "big")
    return load + made.bitwise(kind.size, mask, bytes(kind.size)) + made.compare(OPERATORS[operator], kind.size)


def _range(known: _Known, selector: str, operator: str) -> Pieces:
    field, load = _loaded(known, selector)
    size = field.kind.size
    if field.kind.in_host_order:
        load += made.to_network_order(size)
    if operator == "==":
        return load + made.compare(made.AT_LEAST, size) + made.compare(made.AT_MOST, size)
    return load + made.not_between(size, size)


def _stem(known: _Known, selector: str, operator: str, length: int) -> Pieces:
    return _loaded(known, selector)[1] + made.compare(OPERATORS[operator], length)


def _lookup(known: _Known, selector: str, operator: str, name: str) -> Pieces:
    return _loaded(known, selector)[1] + made.lookup(name, inverted=operator == "!=")


def _set(known: _Known, selector: str, operator: str, is_interval: bool) -> Pieces:  # noqa: FBT001 - a part of a form
    field, load = _loaded(known, selector)
    if is_interval and field.kind.in_host_order and field.kind.shape == "number":
        load += made.to_network_order(field.kind.size)
    if field.literal:
        known.odd.add("network" if selector == "meta nfproto" else "transport")
    return load + made.lookup(ANONYMOUS, set_id=_SET_ID_BYTES, inverted=operator == "!=")


def _masked_set(known: _Known, selector: str, operator: str) -> Pieces:
    load = _loaded(known, selector)[1] + made.bitwise(MARK.size, MARK.size, bytes(MARK.size))
    return load + made.lookup(ANONYMOUS, set_id=_SET_ID_BYTES, inverted=operator == "!=")


def _vmap(known: _Known, selector: str, name: str) -> Pieces:
    return _loaded(known, selector)[1] + made.lookup(name, destination=made.VERDICT_REGISTER)


def _mark(_: _Known, whose: str) -> Pieces:
    return made.immediate(REGISTER, MARK.size) + _write_mark(whose)


def _masked_mark(_: _Known, whose: str) -> Pieces:
    return _read_mark(whose) + made.bitwise(MARK.size, MARK.size, MARK.size) + _write_mark(whose)


def _copy(_: _Known, to: str) -> Pieces:
    return _read_mark("ct" if to == "meta" else "meta") + _write_mark(to)


def _masked_copy(_: _Known, to: str) -> Pieces:
    source = _read_mark("ct" if to == "meta" else "meta")
    return source + made.bitwise(MARK.size, MARK.size, bytes(MARK.size)) + _write_mark(to)


def _read_mark(whose: str) -> Pieces:
    return made.load_meta(made.META_MARK) if whose == "meta" else made.load_ct(made.CT_MARK)


def _write_mark(whose: str) -> Pieces:
    return made.set_meta(made.META_MARK) if whose == "meta" else made.set_ct(made.CT_MARK)


def _nat(known: _Known, nat: str, name: str, is_prefix: bool, family: int) -> Pieces:  # noqa: FBT001 - a part of a form
    number, kind = _FAMILIES[family]
    selector = f"{'ip' if kind is IPV4_ADDRESS else 'ip6'} {'saddr' if nat == 'snat' else 'daddr'}"
    load = _loaded(known, selector)[1] + made.lookup(name, destination=REGISTER)
    way = _SOURCE if nat == "snat" else _DESTINATION
    if not is_prefix:
        return load + made.translate(way, number, (REGISTER, REGISTER), made.NAT_ADDRESS)
    # The last address of the prefix comes right behind the first.
    high = made.AFTER_FOUR if kind is IPV4_ADDRESS else SECOND
    return load + made.translate(way, number, (REGISTER, high), made.NAT_ADDRESS | made.NAT_NETMAP)


def _nat_to(known: _Known, nat: str, family: str, is_prefix: bool, has_port: bool) -> Pieces:  # noqa: FBT001 - parts of a form
    number, kind = _FAMILIES[family]
    if has_port and not known.transport and "transport" not in known.odd:
        raise Inexpressible(nat, "a translation of ports before the protocol is known")
    way = _SOURCE if nat == "snat" else _DESTINATION
    first = made.immediate(REGISTER, kind.size)
    if is_prefix:
        flags = made.NAT_ADDRESS | made.NAT_NETMAP
        return first + made.immediate(SECOND, kind.size) + made.translate(way, number, (REGISTER, SECOND), flags)
    if has_port:
        flags = made.NAT_ADDRESS | made.NAT_PORT
        return first + made.immediate(SECOND, PORT.size) + made.translate(way, number, (REGISTER, REGISTER), flags, SECOND)
    return first + made.translate(way, number, (REGISTER, REGISTER), made.NAT_ADDRESS)


def _mss(_: _Known, has_size: bool) -> Pieces:  # noqa: FBT001 - a part of a form
    if has_size:
        return made.immediate(REGISTER, PORT.size) + made.write_maxseg()
    return made.load_tcpmss() + made.to_network_order(PORT.size) + made.write_maxseg()


def _reject(known: _Known) -> Pieces:
    return made.reject(known.network or None)


_ENCODERS: dict[str, Callable[..., Pieces]] = {
    "plain": _plain,
    "literal": _literal,
    "ports": _ports,
    "masked": _masked,
    "short": _short,
    "bits": _bits,
    "range": _range,
    "stem": _stem,
    "lookup": _lookup,
    "set": _set,
    "masked set": _masked_set,
    "vmap": _vmap,
    "mark": _mark,
    "masked mark": _masked_mark,
    "copy": _copy,
    "masked copy": _masked_copy,
    "nat": _nat,
    "nat to": _nat_to,
    "mss": _mss,
    "reject": _reject,
    "limit": lambda _: made.limit(8, 4),
    "log": lambda _, group, prefix, snaplen: made.log(group, prefix, snaplen),
    "trace": lambda _: made.immediate(REGISTER, b"\1") + made.set_meta(made.META_NFTRACE),
    "counter": lambda _: made.counter(),
    "verdict": lambda _, code, chain: made.verdict_of(code, chain),
    "plain statement": lambda _, name: made.plain(name),
}
