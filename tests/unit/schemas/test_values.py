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
        (Prefix, "::/0", "::/0"),
        (Prefix, "FD00:61:0:0::/32", "fd00:61::/32"),
        (Prefix, "2001:DB8::5", "2001:db8::5/128"),
        (Prefix, "64:ff9b::192.0.2.0/120", "64:ff9b::c000:200/120"),
        (Address, "10.61.0.5", "10.61.0.5"),
        (Address, "2001:0DB8:0:0:1:0:0:5", "2001:db8::1:0:0:5"),
        (Address, "::1", "::1"),
        (Endpoint, "[2001:DB8::7]:08080", "[2001:db8::7]:8080"),
        (Endpoint, "192.0.2.7:51840", "192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:00080", "192.0.2.7:80"),
        (Endpoint, "192.0.2.7:65535", "192.0.2.7:65535"),
        (Endpoint, "GW-c.Example.invalid:05184", "gw-c.example.invalid:5184"),
        (Endpoint, "gateway:7", "gateway:7"),
        (Endpoint, "a1b2.elb.eu-west-1.amazonaws.com:51840", "a1b2.elb.eu-west-1.amazonaws.com:51840"),
        (Endpoint, "7.example:7", "7.example:7"),
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
        (Prefix, "128.0.0.0/0", "write 0.0.0.0/0 for the prefix"),
        (Prefix, "2001:db8::5/64", "has host bits set; write 2001:db8::/64 for the prefix or 2001:db8::5/128 for the address"),
        (Prefix, "fd00::/129", "write it like 10.61.0.0/16 or fd00:61::/32"),
        (Prefix, "fd00::/ffff::", "write it like 10.61.0.0/16 or fd00:61::/32"),
        (Prefix, "fe80::%eth0/64", "has a zone"),
        (Prefix, "::ffff:10.61.0.0/112", "is an IPv4 prefix in IPv6 form; write 10.61.0.0/16"),
        (Prefix, "::ffff:0:0/96", "is an IPv4 prefix in IPv6 form; write 0.0.0.0/0"),
        (Prefix, "", "write it like 10.61.0.0/16"),
        (Address, "10.61.0.5/32", "without a length"),
        (Address, "10.61.0.256", "write it like 10.61.0.5"),
        (Address, "10.61", "write it like 10.61.0.5"),
        (Address, "fd00::1/128", "without a length"),
        (Address, "fe80::1%eth0", "has a zone; write the address without what follows the %"),
        (Address, "::ffff:10.61.0.5", "is an IPv4 address in IPv6 form; write 10.61.0.5"),
        (Address, "fd00:::1", "write it like 10.61.0.5 or fd00:61::5"),
        (Address, "host.example", "write it like 10.61.0.5"),
        (Endpoint, "192.0.2.7", "write it like 192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:0", "write it like 192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:65536", "write it like 192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:+80", "write it like 192.0.2.7:51840"),
        (Endpoint, "192.0.2.7:" + "9" * 5000, "write it like 192.0.2.7:51840"),
        (Endpoint, ":51840", "write it like 192.0.2.7:51840"),
        (Endpoint, "2001:db8::5:51820", "or [2001:db8::7]:51840"),
        (Endpoint, "[2001:db8::5]", "or [2001:db8::7]:51840"),
        (Endpoint, "[192.0.2.7]:51820", "or [2001:db8::7]:51840"),
        (Endpoint, "192.0.2:51820", "or with a DNS name"),
        (Endpoint, "gw.192:51820", "or with a DNS name"),
        (Endpoint, "gw_c.example:51820", "or with a DNS name"),
        (Endpoint, "-gw.example:51820", "or with a DNS name"),
        (Endpoint, "gw..example:51820", "or with a DNS name"),
        (Endpoint, "gw.example.:51820", "or with a DNS name"),
        (Endpoint, "[gw.example]:51820", "or with a DNS name"),
        (Endpoint, "gw.example", "or with a DNS name"),
        (Endpoint, "g" * 64 + ".example:51820", "or with a DNS name"),
        (Endpoint, "gw." * 84 + "example:51820", "or with a DNS name"),
        (Endpoint, "[fe80::5%eth0]:51820", "or [2001:db8::7]:51840"),
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


@pytest.mark.parametrize("base", ["10.61", "fd00:61"])
def test_a_prefix_knows_its_relations(base: str):
    """Overlap, containment and membership, in each family."""
    whole, within, beside = (
        ("10.61.0.0/16", "10.61.4.0/24", "10.62.0.0/16") if base == "10.61" else ("fd00:61::/32", "fd00:61:4::/48", "fd00:62::/32")
    )
    prefix, part, other = Prefix(whole), Prefix(within), Prefix(beside)
    assert prefix.overlaps(part)
    assert part.overlaps(prefix)
    assert not prefix.overlaps(other)
    assert prefix.contains(part)
    assert prefix.contains(prefix)
    assert not part.contains(prefix)
    assert prefix.covers(prefix.address(prefix.size - 1))
    assert not prefix.covers(other.address(0))


def test_two_families_have_nothing_in_common():
    """The whole of one family holds nothing of the other."""
    every4, every6 = Prefix("0.0.0.0/0"), Prefix("::/0")
    assert (every4.family, every6.family) == (4, 6)
    assert not every4.overlaps(every6)
    assert not every6.contains(every4)
    assert not every4.covers(Address("::1"))
    assert not every6.covers(Address("10.0.0.1"))


@pytest.mark.parametrize(
    "prefix,address,onto,translated",
    [
        ("10.61.0.0/16", "10.61.7.9", "10.81.0.0/16", "10.81.7.9"),
        ("fd00:61::/32", "fd00:61:7::9", "2001:db8::/32", "2001:db8:7::9"),
    ],
)
def test_the_host_part_is_kept_when_an_address_is_translated(prefix: str, address: str, onto: str, translated: str):
    """Prefix to prefix of equal length, bit by bit."""
    assert Prefix(prefix).translate(Address(address), Prefix(onto)) == translated


@pytest.mark.parametrize("index", [-1, 256])
@pytest.mark.parametrize("text", ["10.0.0.0/24", "fd00::/120"])
def test_a_prefix_has_no_address_beyond_its_ends(text: str, index: int):
    """A number that is too large is an error and leads to no neighbour's address."""
    with pytest.raises(ValueError, match=f"{text} has no address number"):
        Prefix(text).address(index)


@pytest.mark.parametrize(
    "text,first,last,whole", [("10.0.0.0/24", "10.0.0.0", "10.0.0.255", 32), ("fd00::/120", "fd00::", "fd00::ff", 128)]
)
def test_the_ends_of_a_prefix_are_addresses_of_it(text: str, first: str, last: str, whole: int):
    """First and last address, and the prefix of one address alone."""
    prefix = Prefix(text)
    assert (prefix.address(0), prefix.address(255)) == (first, last)
    assert type(prefix.address(0)) is Address
    assert Address(last).host_prefix == Prefix(f"{last}/{whole}")
    assert Address(last).host_prefix.bare == last
    assert prefix.bare == text


@pytest.mark.parametrize("text", ["10.0.0.0/8", "fd00::/8"])
def test_bytes_and_back(text: str):
    """A prefix and an address are found again from their bytes, as the kernel gives them."""
    prefix = Prefix(text)
    assert Prefix.of(prefix.packed, prefix.length) == prefix
    assert Address.of(prefix.address(7).packed) == prefix.address(7)
    assert len(prefix.packed) == {4: 4, 6: 16}[prefix.family]


@pytest.mark.parametrize("text,address,family", [("192.0.2.7:51840", "192.0.2.7", 4), ("[2001:db8::7]:51840", "2001:db8::7", 6)])
def test_an_endpoint_has_an_address_and_a_port(text: str, address: str, family: int):
    """Taken apart and put together again."""
    endpoint = Endpoint(text)
    assert (endpoint.address, endpoint.port, endpoint.family) == (address, 51840, family)
    assert endpoint.name is None
    assert endpoint.address is not None
    assert Endpoint.at(endpoint.address, endpoint.port) == endpoint
    assert endpoint.moved(2).port == 51842
    assert endpoint.moved(2).address == address


def test_an_endpoint_by_name_has_no_address_and_no_family():
    """They are found out where it is used; the port is known."""
    endpoint = Endpoint("gw-c.example.invalid:51840")
    assert (endpoint.name, endpoint.address, endpoint.family, endpoint.port) == ("gw-c.example.invalid", None, None, 51840)
    assert endpoint.moved(3) == "gw-c.example.invalid:51843"


@given(st.ip_addresses(), st.integers(0, 128))
def test_every_network_is_a_prefix_and_only_its_own_spelling(address: ipaddress.IPv4Address | ipaddress.IPv6Address, length: int):
    """What the standard library takes for a network is one, but for IPv4 in IPv6 form; anything else has host bits."""
    length = min(length, address.max_prefixlen)
    network = ipaddress.ip_network((address, length), strict=False)
    if isinstance(network.network_address, ipaddress.IPv6Address) and network.network_address.ipv4_mapped:
        return
    assert Prefix.parse(str(network)) == str(network)
    if address != network.network_address:
        with pytest.raises(ValueError, match="host bits"):
            Prefix.parse(f"{address}/{length}")


@given(st.ip_addresses(), st.ip_addresses(), st.integers(0, 128))
def test_membership_is_that_of_the_standard_library(one: object, other: object, length: int):
    """Numbers and objects give the same answer."""
    network = ipaddress.ip_network((one, min(length, one.max_prefixlen)), strict=False)  # type: ignore[attr-defined]
    prefix = Prefix(str(network))
    assert prefix.covers(Address(other)) == (other in network)
    assert prefix.size == network.num_addresses
    assert prefix.network == network


@given(st.text(max_size=80))
def test_no_text_breaks_a_parser(text: str):
    for kind in (Prefix, Address, Endpoint, Name, Key, Mac):
        try:
            value = kind.parse(text)
        except ValueError:
            continue
        assert kind.parse(str(value)) == value
