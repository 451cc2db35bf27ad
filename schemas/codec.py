"""JSON and YAML to typed values and back.

What users say is decoded strictly (``decode_topology``): an unknown field is an error. What services say to each other
tolerates unknown fields, so that versions may roll; strictness is a property of the Struct (``forbid_unknown_fields``).

Every failure is a ``DecodeError`` whose text names the field, as ``$.ends[0].remapPods[1]``, and says what is right.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from schemas.values import Text

T = TypeVar("T")


class DecodeError(ValueError):
    """The bytes are not JSON, or not of the wanted shape. `field` is the path, or empty when there is none."""

    def __init__(self, reason: str, field: str = "") -> None:
        self.reason = reason
        self.field = field
        super().__init__(f"{field}: {reason}" if field else reason)


def decode(payload: bytes, kind: type[T]) -> T:
    """Decode JSON into `kind`; DecodeError names the field."""
    try:
        return msgspec.json.decode(payload, type=kind, dec_hook=_decode_scalar)
    except msgspec.ValidationError as error:
        raise _explain(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = f"not valid JSON: {error}"
        raise DecodeError(reason) from None


def convert(value: object, kind: type[T]) -> T:
    """Turn plain dicts and lists (from YAML) into `kind`; DecodeError names the field."""
    try:
        return msgspec.convert(value, type=kind, dec_hook=_decode_scalar)
    except msgspec.ValidationError as error:
        raise _explain(error) from None


def encode(value: object) -> bytes:
    """Encode as compact JSON, fields in declaration order: equal values give equal bytes, but for Structs that omit defaults."""
    return _encoder.encode(value)


def to_builtins(value: object) -> Any:  # noqa: ANN401 - plain JSON data has no narrower type
    """Turn Structs into plain dicts and lists, for YAML or a table."""
    return msgspec.to_builtins(value, enc_hook=_encode_scalar)


def digest(value: object) -> int:
    """A 128-bit digest of one value of a plan. Digests of a set of values are summed modulo 2**128 (``plan.unit_digest``)."""
    return int.from_bytes(hashlib.blake2b(encode(value), digest_size=16).digest(), "big")


def _decode_scalar(kind: type, value: object) -> object:
    if issubclass(kind, Text):
        return kind.parse(value)
    raise NotImplementedError(kind)


def _encode_scalar(value: object) -> object:
    if isinstance(value, Text):
        return str(value)
    raise NotImplementedError(type(value))


_encoder = msgspec.json.Encoder(enc_hook=_encode_scalar)


def _explain(error: msgspec.ValidationError) -> DecodeError:
    reason, at, path = str(error).rpartition(" - at `")
    if not at:
        return DecodeError(str(error))
    return DecodeError(reason, path.rstrip("`"))
