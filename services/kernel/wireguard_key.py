"""The host's WireGuard key: made on the host, in a file for nobody else, and never anywhere else in private."""

from __future__ import annotations

import base64
from functools import lru_cache
from pathlib import Path

from schemas.values import Key
from services.kernel.curve25519 import new_private_key, public_key
from services.kernel.failures import mapped
from services.kernel.sysctls import write_durably
from services.kernel.wireguard_device import DeviceState
from services.runtime.errors import Permanent


class KeyFile:
    """The host's private key, in a file that is made on first use; a process that only looks (`state_dir` None) has none."""

    def __init__(self, state_dir: Path | None) -> None:
        self._folder = state_dir
        self._private = b""
        self._public: Key | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this process is the one that has the key."""
        return self._folder is not None

    @property
    def _file(self) -> Path:
        if self._folder is None:
            msg = "a process that only looks at the kernel has no WireGuard key"
            raise Permanent(msg)
        return self._folder / "wireguard.key"

    def private(self) -> bytes:
        if not self._private:
            self._private = self._load()
        return self._private

    def known(self) -> bytes | None:
        """The private key if there is one already."""
        return self.private() if self._private or self._file.exists() else None

    def public(self) -> Key:
        if self._public is None:
            self._public = public_key(self.private())
        return self._public

    def _load(self) -> bytes:
        try:
            if not self._file.exists():
                write_durably(self._file, base64.b64encode(new_private_key()) + b"\n", 0o600)
            return raw_key(Key.parse(self._file.read_text().strip()))
        except OSError as error:
            raise mapped(error, f"WireGuard key {self._file}") from error
        except ValueError as error:
            msg = f"{self._file} does not hold a WireGuard private key; move it away to have a new one made"
            raise Permanent(msg) from error


def public_half(state: DeviceState) -> Key | None:
    """The public key of a device, which userspace devices do not tell; None for a device without a key."""
    if state.public_key or not state.private_key:
        return Key(base64.b64encode(state.public_key).decode()) if any(state.public_key) else None
    return _derived(state.private_key)


@lru_cache(maxsize=8)
def _derived(private: bytes) -> Key:
    """The public half of a key; a host's devices have one or two between them, and this takes a millisecond."""
    return public_key(private)


def raw_key(key: str) -> bytes:
    """The 32 bytes of a key in base64."""
    return base64.b64decode(key)
