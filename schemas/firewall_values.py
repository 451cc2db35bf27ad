"""The values of a published firewall in canonical form: addresses, ports, marks, protocols, interfaces, names, comments.

Each function takes what was written and gives what the plan says, as nftables lists it; ValueError says what is right.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

COMMENT_BYTES = 128
INTERFACE_BYTES = 15
LAST_PORT, LAST_PROTOCOL, LAST_MARK = 65535, 255, 0xFFFFFFFF
PROTOCOLS = {
    "icmp": 1,
    "tcp": 6,
    "udp": 17,
    "gre": 47,
    "esp": 50,
    "ah": 51,
    "icmpv6": 58,
    "sctp": 132,
    "udplite": 136,
    "dccp": 33,
}
PORT_PROTOCOLS = {PROTOCOLS[name]: name for name in ("tcp", "udp", "udplite", "sctp", "dccp")}
"""Protocols that have ports, by number, as nftables calls them."""
CT_STATES = ("new", "established", "related", "invalid", "untracked")
_NUMBER = re.compile(r"[0-9]{1,10}|0[xX][0-9a-fA-F]{1,8}")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_INTERFACE = re.compile(r"[!#-.0-9;-~]+")  # visible ASCII but quotes, slashes and colons
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,62}")
_ONE_VALUE = r"(?:0x[0-9a-f]+|[0-9]+(?:\.[0-9]+){3}|[0-9]+)"
_LOOKS_LIKE_A_VALUE = re.compile(f"{_ONE_VALUE}(?:-{_ONE_VALUE})?")
_HASH_CHARACTERS = 12
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_NFT_WORDS = frozenset(
    """accept add ah all and arp auto-merge bridge cgroup chain chains comment comp constant continue counter counters cpu create ct day
    dccp define delete describe destroy device devices dnat drop dst dup dynamic ecn element elements eq esp ether exists expires
    export exthdr fib flags flow flowtable flowtables flush frag fwd gc-interval ge get goto gt handle hbh hook hooks hour
    ibriport ibrname icmp icmpv6 igmp iif iifgroup iifname iiftype import include index inet insert interval ip ip6 ipsec jhash
    jump last le limit limits list ll log lshift lt map maps mark masquerade meta meter meters mh missing monitor ne netdev
    nftrace nh not notrack numgen obriport obrname offload oif oifgroup oifname oiftype or osf pkttype policy position priority
    queue quota quotas random redefine redirect reject rename replace reset return rshift rt rt0 rt2 rtclassid rule ruleset sctp
    secmark secmarks set sets size skgid skuid snat socket srh symhash synproxy synproxys table tables tcp th time timeout tproxy
    type typeof udp udplite undefine update vlan vmap xor xt""".split()  # noqa: SIM905 - a list of this length is read more easily so
)
"""Words of nftables 1.0.6 and newer that cannot name a chain or a set: its own listings with them do not load."""


class Span(NamedTuple):
    """Values from `low` to `high`, both included, and how nftables writes them. `family` is nftables' word for that of addresses."""

    low: int
    high: int
    text: str
    family: Literal["", "ip", "ip6"] = ""


def identifier(text: str) -> str:
    """A name for a chain or a set."""
    if not _IDENTIFIER.fullmatch(text):
        msg = f"{text!r} is not a name for nftables; use 1 to 63 letters, digits, '_', '.' and '-', a letter or '_' first"
        raise ValueError(msg)
    if text in _NFT_WORDS:
        msg = f"{text!r} is a word of nftables itself; take another name, as {text}-rules"
        raise ValueError(msg)
    return text


def number(value: int | str, last: int, what: str) -> int:
    """A number from 0 to `last`, from decimal or hexadecimal text too."""
    found = value if isinstance(value, int) else int(value, 0) if _NUMBER.fullmatch(value) and not _octal(value) else -1
    if not 0 <= found <= last:
        msg = f"{value!r} is not a {what}; write a number from 0 to {last}{', decimal or as 0xff00' if what == 'mark' else ''}"
        raise ValueError(msg)
    return found


def mark(value: int | str) -> int:
    return number(value, LAST_MARK, "mark")


def mask(value: int | str) -> int:
    found = mark(value)
    if not found:
        msg = "a mask of 0 leaves nothing; leave it out for all bits"
        raise ValueError(msg)
    return found


def protocol(value: int | str) -> int:
    """The number of an IP protocol. Hosts need not know its name."""
    if isinstance(value, str) and value in PROTOCOLS:
        return PROTOCOLS[value]
    try:
        return number(value, LAST_PROTOCOL, "protocol")
    except ValueError:
        msg = f"{value!r} is not a protocol; write a number from 0 to {LAST_PROTOCOL} or one of {', '.join(sorted(PROTOCOLS))}"
        raise ValueError(msg) from None


def protocol_text(found: int) -> str:
    """A protocol as nftables takes it on any host: by the name that is a word of its own, else by number, without /etc/protocols."""
    return next((name for name, known in PROTOCOLS.items() if known == found and name in _NFT_WORDS), str(found))


def ct_state(value: int | str) -> str:
    if value not in CT_STATES:
        msg = f"{value!r} is not a state of a connection; write one of {', '.join(CT_STATES)}"
        raise ValueError(msg)
    return str(value)


def port(value: int | str) -> Span:
    """A port or a range of ports."""
    found = _PORTS.fullmatch(str(value))
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not 0 <= low <= high <= LAST_PORT:
        msg = f"{value!r} is not a port; write a number from 0 to {LAST_PORT} or a range as 8000-8100"
        raise ValueError(msg)
    return Span(low, high, str(low) if low == high else f"{low}-{high}")


def addresses(value: int | str) -> Span:
    """An address, a prefix without host bits, or a range; a range that is a prefix is written as one."""
    text = str(value)
    try:
        first, dash, last = text.partition("-")
        network = None if dash else ipaddress.ip_network(_with_length(text), strict=False)
        low, high = (network[0], network[-1]) if network is not None else (ipaddress.ip_address(first), ipaddress.ip_address(last))
        if low.version != high.version or int(low) > int(high) or "%" in text:
            raise ValueError(text)  # noqa: TRY301 - one text says what is right for all forms
    except ValueError:
        msg = f"{text!r} is not an address, a prefix or a range of addresses; write it like 10.61.0.5, fd00:61::/64 or 10.0.0.1-10.0.0.9"
        raise ValueError(msg) from None
    if network is not None and ipaddress.ip_address(text.partition("/")[0]) != low:
        msg = f"{text!r} has host bits set; write {network} for the prefix or {text.partition('/')[0]} for the address"
        raise ValueError(msg)
    return _span(low, high)


def interface(value: int | str) -> str:
    r"""An interface name: exact, or with ``*`` at its end for any that begins so. ``\*`` at the end is the character itself."""
    text = str(value)
    literal = text.removesuffix("\\*") if text.endswith("\\*") else text.removesuffix("*")
    length = len(text) - text.endswith("\\*")
    if not text or not 0 < length <= INTERFACE_BYTES or not literal or not _INTERFACE.fullmatch(literal):
        reason = f"at most {INTERFACE_BYTES} visible characters of ASCII without quotes, '/' and ':'"
        msg = f"{text!r} is not the name of an interface: {reason}; '*' at the end stands for any rest"
        raise ValueError(msg)
    if text.startswith("@") or "*" in literal or "\\" in literal:
        msg = f"{text!r} is not the name of an interface: '*' only at the end, '\\*' there for a name that ends in a star, no '@' first"
        raise ValueError(msg)
    return text


def member_interface(value: int | str) -> str:
    """The same for an element of a set or a list: nftables cannot tell there a star from any rest, nor some names from numbers."""
    text = interface(value)
    if text.endswith("\\*"):
        msg = f"{text!r} can only be matched alone: within a set, nftables takes the star for any rest"
        raise ValueError(msg)
    if _LOOKS_LIKE_A_VALUE.fullmatch(text):
        msg = f"{text!r} can only be matched alone: within a set, it would be a number or an address"
        raise ValueError(msg)
    return text


def comment(text: str) -> str:
    """What nftables keeps of a comment: one line, no quotes, at most 128 bytes; a longer one ends in a hash of the whole."""
    plain = _CONTROL.sub(" ", text).replace('"', "'")
    if len(plain.encode()) <= COMMENT_BYTES:
        return plain
    tail = f"~{hashlib.blake2b(text.encode(), digest_size=_HASH_CHARACTERS // 2).hexdigest()}"
    return plain.encode()[: COMMENT_BYTES - len(tail)].decode(errors="ignore") + tail


def overlapping(spans: Iterable[Span]) -> tuple[Span, Span] | None:
    """Two spans that have a value in common, the later one last in order; None when there are none."""
    ordered = sorted(spans)
    return next(((one, other) for one, other in itertools.pairwise(ordered) if other.low <= one.high), None)


def overlapping_names(names: Sequence[str]) -> tuple[int, int] | None:
    """The places of two names or patterns of interfaces that fit one name; None when there are none."""
    # A pattern comes just before all that begins so.
    ordered = sorted((name.removesuffix("*"), not name.endswith("*"), place) for place, name in enumerate(names))
    begins, pattern = None, -1
    for (stem, is_exact, place), (earlier, _, before) in zip(ordered, [("", True, -1), *ordered], strict=False):
        if begins is not None and stem.startswith(begins):
            return pattern, place
        if before >= 0 and stem == earlier:
            return before, place
        if not is_exact:
            begins, pattern = stem, place
    return None


def _octal(text: str) -> bool:
    return len(text) > 1 and text.startswith("0") and text.isdigit()


def _with_length(text: str) -> str:
    """`text`, if its length is a number: a netmask, which ipaddress would take, is no length."""
    _, slash, length = text.partition("/")
    if slash and not length.isdigit():
        raise ValueError(text)
    return text


def _span(low: ipaddress.IPv4Address | ipaddress.IPv6Address, high: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Span:
    size = int(high) - int(low) + 1
    length = low.max_prefixlen - (size.bit_length() - 1)
    text = _text(low)
    if size & (size - 1) or int(low) % size:
        text += f"-{_text(high)}"
    elif size > 1:
        text += f"/{length}"
    return Span(int(low), int(high), text, "ip" if isinstance(low, ipaddress.IPv4Address) else "ip6")


def _text(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """An address as C libraries write it, and so nftables: ipaddress writes ``::ffff:10.0.0.1`` in another way."""
    return socket.inet_ntop(socket.AF_INET if isinstance(address, ipaddress.IPv4Address) else socket.AF_INET6, address.packed)
