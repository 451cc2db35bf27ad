"""X25519 (RFC 7748), as much as a WireGuard key pair needs: a private key, and its public half.

Pure Python, about a millisecond a key, not in constant time: it runs once per start on a key of this very host, and nobody can time it.
"""

from __future__ import annotations

import base64
import os

from schemas.values import Key

_PRIME = 2**255 - 19
_A24 = 121665
_KEY_BYTES = 32


def new_private_key() -> bytes:
    """32 random bytes, clamped."""
    return clamped(os.urandom(_KEY_BYTES))


def clamped(key: bytes) -> bytes:
    """A scalar as RFC 7748 section 5 decodes it."""
    return bytes((key[0] & 248, *key[1:31], key[31] & 127 | 64))


def public_key(private: bytes) -> Key:
    """The public half of a private key, as WireGuard writes it."""
    return Key(base64.b64encode(multiply(private, (9).to_bytes(_KEY_BYTES, "little"))).decode())


def multiply(scalar: bytes, point: bytes) -> bytes:
    """The function X25519 of RFC 7748 section 5: the Montgomery ladder."""
    k = int.from_bytes(clamped(scalar), "little")
    x1 = int.from_bytes(point, "little") & (1 << 255) - 1
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in range(254, -1, -1):
        swap = k >> bit & 1
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % _PRIME, b * b % _PRIME, d * a % _PRIME, c * b % _PRIME
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % _PRIME, x1 * (da - cb) ** 2 % _PRIME
        x2, z2 = aa * bb % _PRIME, e * (aa + _A24 * e) % _PRIME
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, _PRIME - 2, _PRIME) % _PRIME).to_bytes(_KEY_BYTES, "little")
