"""Forms of rules: what is the kernel's own of each rule is left out, and nothing else; and they can be said whatever is in them."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from services.kernel.netlink import attribute, nested
from services.kernel.nftread.rules import by_chain, forms
from services.kernel.nftread.words import rule_text

HANDLE, POSITION = attribute(3, bytes(8)), attribute(6, bytes(8))


def expression(name: str, data: bytes) -> bytes:
    return nested(1, attribute(1, name.encode() + b"\0") + nested(2, data))


def counted(packets: int) -> bytes:
    return expression("counter", attribute(1, b"\0" * 7 + bytes((packets,))) + attribute(2, b"\0" * 7 + bytes((packets,))))


def rule(*expressions: bytes, chain: str = "c", comment: bytes = b"", given: bytes = HANDLE + POSITION) -> bytes:
    notes = attribute(7, comment) if comment else b""
    return attribute(1, b"t\0") + attribute(2, chain.encode() + b"\0") + given + nested(4, b"".join(expressions)) + notes


def form(item: bytes) -> bytes:
    [found] = forms([item], None)
    return found


def test_rules_come_by_chain() -> None:
    """In the pieces in which they come, each of which may have several."""
    one, two = expression("notrack", b""), counted(0)
    pieces = [[rule(one, given=HANDLE), rule(two), rule(one), rule(two, chain="d", given=HANDLE)], [rule(one, chain="e")]]
    found = {name: forms(rules, None) for name, rules in by_chain(pieces)}
    assert found == {"c": (nested(4, one), nested(4, two), nested(4, one)), "d": (nested(4, two),), "e": (nested(4, one),)}
    assert list(by_chain([])) == []


def test_handle_and_position_are_no_part_of_a_rule() -> None:
    """In the usual order or in another one, with attributes that only pad."""
    pad = attribute(8, b"")
    assert {form(rule(counted(0), given=given)) for given in (HANDLE, HANDLE + POSITION, pad + HANDLE + pad + POSITION, b"")} == {
        nested(4, counted(0))
    }


def test_an_unknown_attribute_of_a_rule_is_a_part_of_it() -> None:
    assert form(rule(counted(0), given=HANDLE + attribute(99, b"new!"))) != form(rule(counted(0)))


def test_only_what_counters_counted_is_left_out() -> None:
    """The same bytes in a comment stay, as does every other byte."""
    assert form(rule(counted(5))) == form(rule(counted(6))) == nested(4, counted(0))
    assert form(rule(counted(5), comment=counted(5))) == nested(4, counted(0)) + attribute(7, counted(5))
    assert form(rule(expression("meta", counted(5)))) == nested(4, expression("meta", counted(5)))


def test_a_set_without_a_name_is_what_is_in_it() -> None:
    """Whatever number it has; one with a name is its name."""
    contents = {b"__set1\0": b"one", b"__set12\0": b"one", b"__set2\0": b"two"}

    def looked_up(name: bytes) -> bytes:
        [found] = forms([rule(expression("lookup", attribute(1, name + b"\0") + attribute(2, bytes(4))))], contents.get)
        return found

    assert looked_up(b"__set1") == looked_up(b"__set12") != looked_up(b"__set2")
    assert looked_up(b"tunnels") != looked_up(b"mapped")


NAMES = (
    "payload",
    "meta",
    "ct",
    "fib",
    "rt",
    "bitwise",
    "byteorder",
    "cmp",
    "range",
    "lookup",
    "immediate",
    "nat",
    "masq",
    "reject",
    "log",
)
ATTRIBUTES = st.builds(
    attribute, st.integers(1, 9), st.one_of(st.binary(max_size=20), st.builds(attribute, st.integers(1, 2), st.binary()))
)
EXPRESSIONS = st.builds(expression, st.sampled_from((*NAMES, "new")), st.lists(ATTRIBUTES, max_size=6).map(b"".join))


@given(expressions=st.lists(EXPRESSIONS, max_size=4), tail=st.binary(max_size=30))
@example(expressions=[], tail=b"")
def test_words_are_found_for_anything(expressions: list[bytes], tail: bytes) -> None:
    """For rules that no kernel of today has."""
    text = rule_text(nested(4, b"".join(expressions)) + tail)
    assert isinstance(text, str)


def test_what_is_not_known_has_its_name() -> None:
    """An expression, and an attribute of one that is known."""
    assert rule_text(nested(4, expression("new", attribute(1, b"abcd")))) == "[new 0x0800010061626364]"
    assert rule_text(nested(4, expression("masq", attribute(77, b"\7")))) == "masquerade [masq 77: 0x07]"
