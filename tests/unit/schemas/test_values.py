"""Scalars have one canonical form, and a bad one is told what is right."""

from __future__ import annotations

import base64
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.values import Address, Endpoint, Key, Mac, Name, Prefix, Text

KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.mark.parametrize(
    "kind,spelled,canonical",
    [
        (Prefix, "10.61.0.0/16", "10.61.0.0/16"),
        (Prefix, "10.61.0.0/016", "10.61.0.0/16"),
        (Prefix, "10.61.0.5", "10.61.0.5/32"),
        (Prefix, "10.61.0.5/32", "10.61.0.5/32"),
        (Prefix, "0.0.0.0/0", "0.0.0.0/0"),
        (Address, "10.61.0.5", "10.61.0.5"),
        (Endpoint, "192.0.2.7:51840", "192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:00080", "192.0.2.7:80"),
        (Endpoint, "192.0.2.7:65535", "192.0.2.7:65535"),
        (Name, "ip-10-0-0-1.eu-west-1.compute.internal", "ip-10-0-0-1.eu-west-1.compute.internal"),
        (Name, "a", "a"),
        (Name, "A_b.c-9", "A_b.c-9"),
        (Name, "n" * 63, "n" * 63),
        (Key, KEY, KEY),
        (Key, "A" * 42 + "B=", "A" * 43 + "="),  # bits beyond the 256th mean nothing
        (Mac, "02:AB:00:00:00:01", "02:ab:00:00:00:01"),
    ],
)
def test_a_good_value_takes_its_canonical_form(kind: type[Text], spelled: str, canonical: str):
    value = kind.parse(spelled)
    assert value == canonical
    assert type(value) is kind
    assert kind.parse(value) == value


@pytest.mark.parametrize(
    "kind,bad,advice",
    [
        (Prefix, "10.61.0.5/16", "has host bits set; write 10.61.0.0/16 for the prefix or 10.61.0.5/32 for the address"),
        (Prefix, "10.61.0.0/33", "write it like 10.61.0.0/16"),
        (Prefix, "10.61.0.0/", "write it like 10.61.0.0/16"),
        (Prefix, "10.61.0.0/-1", "write it like 10.61.0.0/16"),
        (Prefix, "10.61.0.0/255.255.0.0", "write it like 10.61.0.0/16"),
        (Prefix, "10.0.0.0/0.255.255.255", "write it like 10.61.0.0/16"),
        (Prefix, "10.61.0.0/16/16", "write it like 10.61.0.0/16"),
        (Prefix, " 10.61.0.0/16", "write it like 10.61.0.0/16"),
        (Prefix, "010.61.0.0/16", "write it like 10.61.0.0/16"),
        (Prefix, "10.61/16", "write it like 10.61.0.0/16"),
        (Prefix, "\u0660.0.0.0/8", "write it like 10.61.0.0/16"),
        (Prefix, "fd00::/8", "not an IPv4 prefix"),
        (Prefix, "", "write it like 10.61.0.0/16"),
        (Address, "10.61.0.5/32", "without a length"),
        (Address, "10.61.0.256", "write it like 10.61.0.5"),
        (Address, "10.61", "write it like 10.61.0.5"),
        (Address, "fd00::1", "not an IPv4 address"),
        (Address, "host.example", "write it like 10.61.0.5"),
        (Endpoint, "192.0.2.7", "write it like 192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:0", "write it like 192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:65536", "write it like 192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:+80", "write it like 192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:" + "9" * 5000, "write it like 192.0.2.7:51840"),
        (Endpoint, ":51840", "write it like 192.0.2.7:51840"),
        (Endpoint, "2001:db8::5:51820", "write it like 192.0.2.7:51840"),
        (Name, "", "use 1 to 63 letters"),
        (Name, "n" * 64, "use 1 to 63 letters"),
        (Name, "-a", "a letter or digit first and last"),
        (Name, "a.", "a letter or digit first and last"),
        (Name, "a b", "use 1 to 63 letters"),
        (Name, "a/b", "use 1 to 63 letters"),
        (Name, "a\n", "use 1 to 63 letters"),
        (Name, "né", "use 1 to 63 letters"),
        (Key, "", "write 32 bytes in base64"),
        (Key, KEY[:-1], "write 32 bytes in base64"),
        (Key, KEY + "\n", "write 32 bytes in base64"),
        (Key, base64.b64encode(bytes(31)).decode(), "write 32 bytes in base64"),
        (Key, "é", "write 32 bytes in base64"),
        (Mac, "02-00-00-00-00-01", "write it like 02:00:00:00:00:01"),
        (Mac, "02:00:00:00:00", "write it like 02:00:00:00:00:01"),
        (Mac, "02:00:00:00:00:0g", "write it like 02:00:00:00:00:01"),
    ],
)
def test_a_bad_value_is_told_what_is_right(kind: type[Text], bad: str, advice: str):
    with pytest.raises(ValueError) as failure:
        kind.parse(bad)
    assert advice in str(failure.value)
    assert repr(bad) in str(failure.value)


@pytest.mark.parametrize("kind", [Prefix, Address, Endpoint, Name, Key, Mac])
@pytest.mark.parametrize("bad", [5, None, True, ["10.0.0.1"], b"10.0.0.1"])
def test_what_is_no_text_is_refused(kind: type[Text], bad: object):
    with pytest.raises(ValueError, match=f"expected text, got {type(bad).__name__}"):
        kind.parse(bad)


def test_a_prefix_knows_its_relations():
    prefix, part, other = Prefix("10.61.0.0/16"), Prefix("10.61.4.0/24"), Prefix("10.62.0.0/16")
    assert prefix.length == 16
    assert prefix.overlaps(part)
    assert part.overlaps(prefix)
    assert not prefix.overlaps(other)
    assert prefix.contains(part)
    assert not part.contains(prefix)
    assert prefix.covers(Address("10.61.255.255"))
    assert not prefix.covers(Address("10.62.0.0"))


def test_the_host_part_is_kept_when_an_address_is_translated():
    assert Prefix("10.61.0.0/16").translate(Address("10.61.7.9"), Prefix("10.81.0.0/16")) == "10.81.7.9"


@pytest.mark.parametrize("index", [-1, 256])
def test_a_prefix_has_no_address_beyond_its_ends(index: int):
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/24 has no address number"):
        Prefix("10.0.0.0/24").address(index)


def test_the_ends_of_a_prefix_are_addresses_of_it():
    prefix = Prefix("10.0.0.0/24")
    assert (prefix.address(0), prefix.address(255)) == ("10.0.0.0", "10.0.0.255")
    assert type(prefix.address(0)) is Address
    assert Address("10.0.0.7").host_prefix == Prefix("10.0.0.7/32")


def test_an_endpoint_has_an_address_and_a_port():
    endpoint = Endpoint("192.0.2.7:51840")
    assert (endpoint.address, endpoint.port) == ("192.0.2.7", 51840)


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_every_network_is_a_prefix_and_only_its_own_spelling(address: ipaddress.IPv4Address, length: int):
    network = ipaddress.IPv4Network((address, length), strict=False)
    assert Prefix.parse(str(network)) == str(network)
    if address != network.network_address:
        with pytest.raises(ValueError, match="host bits"):
            Prefix.parse(f"{address}/{length}")


@given(st.text(max_size=80))
def test_no_text_breaks_a_parser(text: str):
    for kind in (Prefix, Address, Endpoint, Name, Key, Mac):
        try:
            value = kind.parse(text)
        except ValueError:
            continue
        assert kind.parse(str(value)) == value
