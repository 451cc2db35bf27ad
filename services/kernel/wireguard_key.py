"""The host's WireGuard keys: made on the host, in files for nobody else, and never anywhere else in private.

There is one in force, and while it is being changed a second one: `next`, or `withdrawn` when its coming was taken back but a device may
have it still. What each is, its file's name says, so that it is the same after a kill at any instant: one becomes the other by a rename.
"""

from __future__ import annotations

import base64
from functools import lru_cache
from pathlib import Path

from schemas.values import Key
from services.kernel.curve25519 import new_private_key, public_key
from services.kernel.failures import mapped
from services.kernel.port import KeyRing
from services.kernel.sysctls import rename_durably, write_durably
from services.kernel.wireguard_device import DeviceState
from services.runtime.errors import Permanent

_CURRENT, _NEXT, _WITHDRAWN = "wireguard.key", "wireguard.next.key", "wireguard.withdrawn.key"


class KeyFiles:
    """The host's private keys, of which the first is made on first use; a process that only looks (`state_dir` None) has none."""

    def __init__(self, state_dir: Path | None) -> None:
        self._folder = state_dir
        self._private: dict[str, bytes] = {}
        """By file, of those that were read."""

    @property
    def is_ours(self) -> bool:
        """Whether this process is the one that has the keys."""
        return self._folder is not None

    def private(self, public: Key | None = None) -> bytes:
        """The private half of one of the host's keys, or of the one in force where it has none such."""
        return next((found for found in self._others() if _derived(found) == public), None) or self._current()

    def known(self) -> dict[bytes, Key]:
        """All private keys that are there already, with their public halves."""
        there = self._private.get(_CURRENT) or self._path(_CURRENT).exists()
        return {found: _derived(found) for found in (*((self._current(),) if there else ()), *self._others())}

    def public(self) -> Key:
        return _derived(self._current())

    def planned(self, public: Key | None) -> Key:
        """The public key that a device has for which `public` is planned."""
        return _derived(self.private(public))

    def ring(self) -> KeyRing:
        """The public halves of all of them."""
        after, withdrawn = self._loaded(_NEXT), self._loaded(_WITHDRAWN)
        return KeyRing(self.public(), _derived(after) if after else None, _derived(withdrawn) if withdrawn else None)

    def make_next(self) -> None:
        """Make the key that is to follow; the one that is there already, also one that was withdrawn."""
        if self._loaded(_NEXT) is not None:
            return
        if self._loaded(_WITHDRAWN) is not None:
            self._rename(_WITHDRAWN, _NEXT)
        else:
            self._write(_NEXT, new_private_key())

    def withdraw_next(self) -> None:
        """Take back the coming of the next key; devices may have it until it is forgotten."""
        if self._loaded(_NEXT) is not None:
            self._rename(_NEXT, _WITHDRAWN)

    def forget_withdrawn(self) -> None:
        """Destroy a key that was withdrawn."""
        try:
            self._path(_WITHDRAWN).unlink(missing_ok=True)
        except OSError as error:
            raise mapped(error, f"WireGuard key {self._path(_WITHDRAWN)}") from error
        self._private.pop(_WITHDRAWN, None)

    def promote(self, public: Key) -> None:
        """Let this key take the place of the one in force, which is destroyed; nothing where it is none of the others."""
        for name in (_NEXT, _WITHDRAWN):
            private = self._loaded(name)
            if private is not None and _derived(private) == public:
                self._rename(name, _CURRENT)

    def _others(self) -> list[bytes]:
        return [found for name in (_NEXT, _WITHDRAWN) if (found := self._loaded(name)) is not None]

    def _current(self) -> bytes:
        found = self._loaded(_CURRENT)
        return found if found is not None else self._write(_CURRENT, new_private_key())

    def _path(self, name: str) -> Path:
        if self._folder is None:
            msg = "a process that only looks at the kernel has no WireGuard key"
            raise Permanent(msg)
        return self._folder / name

    def _loaded(self, name: str) -> bytes | None:
        """The key in a file, None for no file."""
        if name not in self._private:
            path = self._path(name)
            try:
                if not path.exists():
                    return None
                self._private[name] = raw_key(Key.parse(path.read_text().strip()))
            except OSError as error:
                raise mapped(error, f"WireGuard key {path}") from error
            except ValueError as error:
                msg = f"{path} does not hold a WireGuard private key; move it away to have a new one made"
                raise Permanent(msg) from error
        return self._private[name]

    def _write(self, name: str, private: bytes) -> bytes:
        path = self._path(name)
        try:
            write_durably(path, base64.b64encode(private) + b"\n", 0o600)
        except OSError as error:
            raise mapped(error, f"WireGuard key {path}") from error
        self._private[name] = private
        return private

    def _rename(self, old: str, new: str) -> None:
        """What had the new name is gone then."""
        path = self._path(old)
        try:
            rename_durably(path, self._path(new))
        except OSError as error:
            raise mapped(error, f"WireGuard key {path}") from error
        self._private[new] = self._private.pop(old)


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
