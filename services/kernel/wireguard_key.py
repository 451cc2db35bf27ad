"""The host's WireGuard key: made on the host, in a file for nobody else, and never anywhere else in private."""

from __future__ import annotations

import base64
from pathlib import Path

from schemas.values import Key
from services.kernel.curve25519 import new_private_key, public_key
from services.kernel.failures import mapped
from services.kernel.sysctls import write_durably
from services.runtime.errors import Permanent


class KeyFile:
    """The host's private key, in a file that is made on first use."""

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / "wireguard.key"
        self._private = b""
        self._public: Key | None = None

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


def raw_key(key: str) -> bytes:
    """The 32 bytes of a key in base64."""
    return base64.b64decode(key)
