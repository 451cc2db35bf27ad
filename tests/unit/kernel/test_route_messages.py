"""Routes as messages and back: what many routes have in common is made once, and nobody can tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.host_objects import NextHop, Route
from schemas.values import Address, Prefix
from services.kernel.interfaces import Interface
from services.kernel.netlink import attribute, attributes
from services.kernel.route_messages import INFO, TABLE, Decoder, Encoder, in_kernel_form
from services.kernel.rows import bodies
from services.kernel.transaction import Listed
from services.runtime.errors import Waiting

LINKS = {"eth1": Interface(3, "eth1", True), "eth2": Interface(4, "eth2", True), "eth3": Interface(5, "eth3", False)}
NAMES = {item.index: item.name for item in LINKS.values()}
VIA = {4: Address("10.0.0.1"), 6: Address("fd00::1")}
PREFIXES = (
    "10.1.0.0/16",
    "10.2.0.0/16",
    "10.2.3.4/32",
    "0.0.0.0/0",
    "fd00:1::/32",
    "fd00:2::/32",
    "::ffff:10.1.2.3/128",
    "::/0",
    "::1.2.3.4/128",
)


@st.composite
def any_route(draw: st.DrawFn) -> Route:
    prefix = Prefix(Prefix.of(*_packed(draw(st.sampled_from(PREFIXES)))))
    kind = draw(st.sampled_from(("unicast", "throw", "blackhole", "unreachable", "prohibit")))
    hops: tuple[NextHop, ...] = ()
    if kind == "unicast":
        links = draw(st.sampled_from((("eth1",), ("eth2",), ("eth1", "eth2"))))
        hops = tuple(NextHop(link, VIA[prefix.family], draw(st.booleans()), draw(st.integers(1, 256))) for link in links)
    source = draw(st.sampled_from((None, VIA[prefix.family])))
    return Route(draw(st.sampled_from((7, 254, 7000))), prefix, kind, draw(st.sampled_from((0, 5))), hops, source)


def _packed(text: str) -> tuple[bytes, int]:
    prefix = Prefix(text)
    return prefix.packed, prefix.length


def as_dumped(body: bytes) -> bytes:
    """As the kernel dumps it: the table comes first, and an IPv6 route has more behind."""
    found = attributes(body, INFO.size)
    order = [TABLE, *[kind for kind in found if kind != TABLE]]
    more = attribute(20, b"\0") if body[0] == 10 else b""
    return body[: INFO.size] + b"".join(attribute(kind, found[kind]) for kind in order) + more


@given(st.lists(any_route(), max_size=20))
def test_a_route_comes_back_as_it_went(items: list[Route]) -> None:
    """In the kernel's form, by one encoder and one decoder for all, as by new ones for each."""
    encoder, decoder = Encoder(LINKS), Decoder(NAMES)
    for item in items:
        body = encoder.body(item)
        assert body == Encoder(LINKS).body(item)
        assert decoder.route(as_dumped(body)) == decoder.route(body) == Decoder(NAMES).route(body) == in_kernel_form(item)


@given(st.lists(st.tuples(any_route(), st.sampled_from((1, 1, 9))), max_size=8), st.booleans())
def test_many_are_made_as_each_alone(items: list[tuple[Route, int]], is_up: bool) -> None:
    """In their order, those alike in a row and all others; those that cannot be made are told by their place."""
    routes = [item for item, count in items for _ in range(count)]
    encoder = Encoder(LINKS if is_up else {"eth1": LINKS["eth1"]})
    expected: list[bytes] = []
    refused: dict[int, str] = {}
    for place, item in enumerate(routes):
        try:
            expected.append(encoder.body(item))
        except Waiting as error:
            refused[place] = str(error)
    found = encoder.rows(routes)
    assert bodies(found.rows) == expected
    assert {place: str(error) for place, error in found.refused.items()} == refused


def test_what_is_not_known_is_listed_each_time() -> None:
    """An attribute of a newer kernel, a type without a name: never taken for a route that lacks it, nor remembered as its like."""
    item = Route(7000, Prefix("10.1.0.0/16"), "throw")
    body = as_dumped(Encoder({}).body(item))
    decoder = Decoder({})
    for strange in (body + attribute(99, b"\1\2"), INFO.pack(*[*INFO.unpack_from(body)[:7], 77, 0]) + body[INFO.size :]):
        assert isinstance(decoder.route(strange), Listed)
        assert decoder.route(body) == item
        assert isinstance(decoder.route(strange), Listed)


@pytest.mark.parametrize("link, state", [("eth3", "down"), ("eth9", "not there")])
def test_a_link_that_cannot_carry_a_route_is_waited_for(link: str, state: str) -> None:
    """Each time it is asked, by the name of each route."""
    encoder = Encoder(LINKS)
    for prefix in ("10.1.0.0/16", "10.2.0.0/16"):
        with pytest.raises(Waiting, match=f"route 7 {prefix} 0: link {link} is {state}"):
            encoder.body(Route(7, Prefix(prefix), hops=(NextHop("eth1"), NextHop(link))))


def test_the_kernel_s_form_of_what_is_in_it_is_itself() -> None:
    """The very same object: a plan's routes are not held twice."""
    item = Route(7, Prefix("10.1.0.0/16"), hops=(NextHop("eth1"),))
    assert in_kernel_form(item) is item
    assert in_kernel_form(replace(item, scope="link")) == item
    assert in_kernel_form(replace(item, hops=(NextHop("eth1", weight=3),))) == item
