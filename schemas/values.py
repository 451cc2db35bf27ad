"""Scalar values with one canonical form: prefixes, addresses, names, keys.

Each is a ``str`` whose text is canonical, so that equality, hashing and ordering of text are equality, hashing
and ordering of the value. They are made by ``parse`` (through the codec, for what arrives on the wire) and raise
``ValueError`` with a text that says what is right.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import socket
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_QUAD = r"[0-9]{1,3}(\.[0-9]{1,3}){3}"
_COLONS = r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]*"
_NUMBER = re.compile(r"[0-9]{1,5}")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_LAST_PORT = 65535
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")

Family = Literal[4, 6]
IPV4: Literal[4] = 4
IPV6: Literal[6] = 6
FAMILIES: tuple[Family, ...] = (IPV4, IPV6)
_BITS = {IPV4: 32, IPV6: 128}
_MAPPED_BITS = 96
SOCKET_FAMILY = {IPV4: socket.AF_INET, IPV6: socket.AF_INET6}
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def wire_name(field: str) -> str:
    """The name of a field in JSON: camelCase, and the unit of a time in full (``first_seen_s`` is ``firstSeenSeconds``)."""
    head, *rest = (f"{field.removesuffix('_s')}_seconds" if field.endswith("_s") else field).split("_")
    return head + "".join(word.capitalize() for word in rest)


class Text(str):
    """A string in canonical form; subclasses say of what.

    `json_schema` says the same to a JSON Schema validator, as far as a pattern can; ``parse`` has the last word.
    """

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {}

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return the canonical form of `value`; ValueError says what is right."""
        if not isinstance(value, str):
            msg = f"expected text, got {type(value).__name__}"
            raise ValueError(msg)
        return cls(cls.canonical(value))

    @classmethod
    def canonical(cls, value: str) -> str:
        raise NotImplementedError


class Prefix(Text):
    """An IP prefix in CIDR form, of either family; a bare address is a /32 or /128. Host bits are refused, never masked silently.

    Prefixes of two families have nothing in common: they neither overlap nor contain one another.
    """

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {
        "pattern": rf"^({_QUAD}(/[0-9]{{1,2}})?|{_COLONS}(/[0-9]{{1,3}})?)$",
        "examples": ["10.61.0.0/16", "fd00:61::/32"],
    }

    @classmethod
    def canonical(cls, value: str) -> str:
        return _canonical_prefix(value)

    @classmethod
    def of(cls, packed: bytes, length: int) -> Self:
        """The prefix of the first `length` bits of an address of 4 or 16 bytes, of which the rest is zero."""
        return cls(f"{ipaddress.ip_address(packed)}/{length}")

    @property
    def network(self) -> Network:
        return ipaddress.ip_network(self)

    @property
    def family(self) -> Family:
        return IPV6 if ":" in self else IPV4

    @property
    def length(self) -> int:
        """Number of leading bits that count, 0 to 32 or 128."""
        return _span(self).length

    @property
    def packed(self) -> bytes:
        """The first address, 4 or 16 bytes."""
        return _span(self).first.to_bytes(_BITS[self.family] // 8, "big")

    @property
    def size(self) -> int:
        """How many addresses there are."""
        return 1 << _BITS[self.family] - self.length

    @property
    def bare(self) -> str:
        """The prefix without its length where that says nothing: an address for a /32 or /128, as nftables and `ip` print it."""
        return self.rpartition("/")[0] if self.length == _BITS[self.family] else str(self)

    def overlaps(self, other: Prefix) -> bool:
        return self.contains(other) or other.contains(self)

    def covers(self, address: Address) -> bool:
        family, first, last, _ = _span(self)
        of, number = _number(address)
        return of == family and first <= number <= last

    def contains(self, other: Prefix) -> bool:
        mine, theirs = _span(self), _span(other)
        return mine.family == theirs.family and mine.first <= theirs.first and theirs.last <= mine.last

    def address(self, index: int) -> Address:
        """The address `index` places after the first one; ValueError when the prefix has no such address."""
        span = _span(self)
        if not 0 <= index <= span.last - span.first:
            msg = f"{self} has no address number {index}"
            raise ValueError(msg)
        return Address.of((span.first + index).to_bytes(_BITS[span.family] // 8, "big"))

    def place(self, address: Address) -> int:
        """How many places after the first one a member of this prefix is."""
        return _number(address)[1] - _span(self).first

    def translate(self, address: Address, onto: Prefix) -> Address:  # type: ignore[override]
        """`address`, a member of this prefix, as the member of `onto`, of the same family, with the same host part."""
        return onto.address(self.place(address))


class Address(Text):
    """An IP address of either family, without a zone."""

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {"pattern": rf"^({_QUAD}|{_COLONS})$", "examples": ["10.61.0.5", "fd00:61::5"]}

    def __new__(cls, value: object) -> Self:
        return super().__new__(cls, str(value))

    @classmethod
    def canonical(cls, value: str) -> str:
        return _canonical_address(value)

    @classmethod
    def of(cls, packed: bytes) -> Self:
        """The address of 4 or 16 bytes."""
        return cls(ipaddress.ip_address(packed))

    @property
    def family(self) -> Family:
        return IPV6 if ":" in self else IPV4

    @property
    def packed(self) -> bytes:
        """4 or 16 bytes."""
        return _number(self)[1].to_bytes(_BITS[self.family] // 8, "big")

    @property
    def host_prefix(self) -> Prefix:
        return Prefix(f"{self}/{_BITS[self.family]}")


class Endpoint(Text):
    """A UDP endpoint, ``address:port``, ``[address]:port`` for IPv6, or ``name:port``, where `name` is one of DNS that the host looks up.

    A name has neither address nor family before that, and each host may find others.
    """

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {
        "pattern": rf"^({_QUAD}|\[{_COLONS}\]|{_LABEL}(\.{_LABEL})*):[0-9]{{1,5}}$",
        "examples": ["192.0.2.7:51840", "[2001:db8::7]:51840", "gw.example.net:51840"],
    }

    @classmethod
    def canonical(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        try:
            if not _NUMBER.fullmatch(port) or not 0 < int(port) <= _LAST_PORT:
                raise ValueError(port)  # noqa: TRY301 - one text says what is right for all parts
            if not is_bracketed and _is_host_name(host):
                return f"{host.lower()}:{int(port)}"
            address = Address(_canonical_address(host[1:-1] if is_bracketed else host))
            if is_bracketed != (address.family == IPV6):
                raise ValueError(host)  # noqa: TRY301 - as above
        except ValueError:
            msg = f"{value!r} is not an endpoint; write it like 192.0.2.7:51840 or [2001:db8::7]:51840, or with a DNS name"
            raise ValueError(msg) from None
        return str(cls.at(address, int(port)))

    @classmethod
    def at(cls, address: Address, port: int) -> Self:
        return cls(f"[{address}]:{port}" if address.family == IPV6 else f"{address}:{port}")

    def moved(self, steps: int) -> Self:
        """The endpoint so many ports further on."""
        host, _, port = self.rpartition(":")
        return type(self)(f"{host}:{int(port) + steps}")

    @property
    def name(self) -> str | None:
        """The DNS name, None for an address."""
        host = self.rpartition(":")[0]
        return host if _is_host_name(host) else None

    @property
    def address(self) -> Address | None:
        """The address, None for a name."""
        return None if self.name else Address(self.rpartition(":")[0].strip("[]"))

    @property
    def family(self) -> Family | None:
        """The family of the address, None for a name."""
        return address.family if (address := self.address) else None

    @property
    def port(self) -> int:
        return int(self.rpartition(":")[2])


class _Span(NamedTuple):
    """A prefix in numbers: its family, first and last address, and length."""

    family: int
    first: int
    last: int
    length: int


@lru_cache(maxsize=65536)
def _span(prefix: str) -> _Span:
    text, _, length = prefix.partition("/")
    family, first = _number(text)
    return _Span(family, first, first | (1 << _BITS[family] - int(length)) - 1, int(length))


@lru_cache(maxsize=65536)
def _number(address: str) -> tuple[int, int]:
    """Family and number of an address."""
    family = IPV6 if ":" in address else IPV4
    return family, int.from_bytes(socket.inet_pton(SOCKET_FAMILY[family], address), "big")


@lru_cache(maxsize=4096)
def _canonical_prefix(value: str) -> str:
    _, slash, length = value.partition("/")
    try:
        if slash and not _NUMBER.fullmatch(length):
            raise ValueError(length)  # noqa: TRY301 - a netmask, which ipaddress would take, wildcard masks too
        interface = ipaddress.ip_interface(value)
    except ValueError:
        msg = f"{value!r} is not a prefix; write it like 10.61.0.0/16 or fd00:61::/32"
        raise ValueError(msg) from None
    if isinstance(interface, ipaddress.IPv6Interface):
        _refuse_odd_form(value, interface)
    if interface.ip != interface.network.network_address:
        whole = interface.ip.max_prefixlen
        msg = f"{value!r} has host bits set; write {interface.network} for the prefix or {interface.ip}/{whole} for the address"
        raise ValueError(msg)
    return str(interface.network)


@lru_cache(maxsize=4096)
def _canonical_address(value: str) -> str:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        msg = f"{value!r} is not an IP address; write it like 10.61.0.5 or fd00:61::5, without a length"
        raise ValueError(msg) from None
    if isinstance(address, ipaddress.IPv6Address):
        _refuse_odd_form(value, address)
    return str(address)


@lru_cache(maxsize=4096)
def _is_host_name(text: str) -> bool:
    """True for a DNS name; one that ends in a number is meant for an address (RFC 3696, section 2)."""
    return _HOST_NAME.fullmatch(text) is not None and not text.rpartition(".")[2].isdecimal()


def _refuse_odd_form(value: str, address: ipaddress.IPv6Address | ipaddress.IPv6Interface) -> None:
    """ValueError for a zone, which means something on one host only, and for IPv4 in IPv6 form, which the kernel does not route."""
    if address.scope_id is not None:
        msg = f"{value!r} has a zone; write the address without what follows the %"
        raise ValueError(msg)
    if address.ipv4_mapped is None:
        return
    if isinstance(address, ipaddress.IPv6Interface):
        length = address.network.prefixlen - _MAPPED_BITS
        if length < 0:  # what it has wrong is host bits
            return
        msg = f"{value!r} is an IPv4 prefix in IPv6 form; write {ipaddress.ip_interface((address.ipv4_mapped, length)).network}"
    else:
        msg = f"{value!r} is an IPv4 address in IPv6 form; write {address.ipv4_mapped}"
    raise ValueError(msg)


class Name(Text):
    """The name of a cluster, host or object, as in RFC 1123 with capitals and ``_`` allowed: 1 to 63 characters.

    Dots are fine, and so are names longer than the kernel takes: each place where a name goes encodes or shortens it
    (``schemas.subjects``, ``services.planner.names``).
    """

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {"pattern": rf"^{_NAME.pattern}$", "minLength": 1, "maxLength": 63}

    @classmethod
    def canonical(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            msg = f"{value!r} is not a name; use 1 to 63 letters, digits, '.', '_' and '-', a letter or digit first and last"
            raise ValueError(msg)
        return value


class Key(Text):
    """A WireGuard public key, 32 bytes in base64."""

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {"pattern": "^[A-Za-z0-9+/]{43}=$", "contentEncoding": "base64"}

    @classmethod
    def canonical(cls, value: str) -> str:
        try:
            raw = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != 32:  # noqa: PLR2004 - the length of a Curve25519 key
            msg = f"{value!r} is not a WireGuard key; write 32 bytes in base64 (44 characters)"
            raise ValueError(msg)
        return base64.b64encode(raw).decode()


class Mac(Text):
    """An Ethernet address, lower case with colons."""

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {"pattern": "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$"}

    @classmethod
    def canonical(cls, value: str) -> str:
        text = value.lower()
        if not _MAC.fullmatch(text):
            msg = f"{value!r} is not an Ethernet address; write it like 02:00:00:00:00:01"
            raise ValueError(msg)
        return text
