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
from functools import lru_cache
from typing import Any, ClassVar, Self

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_QUAD = r"[0-9]{1,3}(\.[0-9]{1,3}){3}"
_NUMBER = re.compile(r"[0-9]{1,5}")
_LAST_PORT = 65535
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


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
    """An IP prefix in CIDR form; a bare address is a /32. Host bits are refused, never masked silently."""

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {"pattern": rf"^{_QUAD}(/[0-9]{{1,2}})?$", "examples": ["10.61.0.0/16"]}

    @classmethod
    def canonical(cls, value: str) -> str:
        _, slash, length = value.partition("/")
        try:
            if slash and not _NUMBER.fullmatch(length):
                raise ValueError(length)  # noqa: TRY301 - a netmask, which ipaddress would take, wildcard masks too
            interface = ipaddress.IPv4Interface(value)
        except ValueError:
            msg = f"{value!r} is not an IPv4 prefix; write it like 10.61.0.0/16"
            raise ValueError(msg) from None
        if interface.ip != interface.network.network_address:
            msg = f"{value!r} has host bits set; write {interface.network} for the prefix or {interface.ip}/32 for the address"
            raise ValueError(msg)
        return str(interface.network)

    @property
    def network(self) -> ipaddress.IPv4Network:
        return _network(str(self))

    @property
    def length(self) -> int:
        """Number of leading bits that count, 0 to 32."""
        return self.network.prefixlen

    def overlaps(self, other: Prefix) -> bool:
        return self.network.overlaps(other.network)

    def covers(self, address: Address) -> bool:
        return ipaddress.IPv4Address(address) in self.network

    def contains(self, other: Prefix) -> bool:
        return other.network.subnet_of(self.network)

    def address(self, index: int) -> Address:
        """The address `index` places after the first one; ValueError when the prefix has no such address."""
        if not 0 <= index < self.network.num_addresses:
            msg = f"{self} has no address number {index}"
            raise ValueError(msg)
        return Address(self.network.network_address + index)

    def translate(self, address: Address, onto: Prefix) -> Address:  # type: ignore[override]
        """`address`, a member of this prefix, as the member of `onto` with the same host part."""
        offset = int(ipaddress.IPv4Address(address)) - int(self.network.network_address)
        return onto.address(offset)


class Address(Text):
    """An IP address."""

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {"pattern": rf"^{_QUAD}$", "format": "ipv4", "examples": ["10.61.0.5"]}

    def __new__(cls, value: object) -> Self:
        return super().__new__(cls, str(value))

    @classmethod
    def canonical(cls, value: str) -> str:
        try:
            return str(ipaddress.IPv4Address(value))
        except ValueError:
            msg = f"{value!r} is not an IPv4 address; write it like 10.61.0.5, without a length"
            raise ValueError(msg) from None

    @property
    def host_prefix(self) -> Prefix:
        return Prefix(f"{self}/32")


class Endpoint(Text):
    """A UDP endpoint, ``address:port``."""

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {"pattern": rf"^{_QUAD}:[0-9]{{1,5}}$", "examples": ["192.0.2.7:51840"]}

    @classmethod
    def canonical(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        try:
            address = ipaddress.IPv4Address(host)
            if not _NUMBER.fullmatch(port) or not 0 < int(port) <= _LAST_PORT:
                raise ValueError(port)  # noqa: TRY301 - one text says what is right for both halves
        except ValueError:
            msg = f"{value!r} is not an endpoint; write it like 192.0.2.7:51840"
            raise ValueError(msg) from None
        return f"{address}:{int(port)}"

    @property
    def address(self) -> Address:
        return Address(self.rpartition(":")[0])

    @property
    def port(self) -> int:
        return int(self.rpartition(":")[2])


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


@lru_cache(maxsize=65536)
def _network(text: str) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(text)
