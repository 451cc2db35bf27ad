"""The error tree. Every library error that can reach a service is mapped into it where the library is called.

MeshmarkError
├── Transient        try again after `retry_after_s`
├── Waiting          try again when `waiting_for` happens (a link, an address, a key)
├── Permanent        the same input will always fail
│   └── Poison       a message that cannot be understood: dead letter
├── Conflict         somebody else owns it, or was first: read again, then decide
└── OutcomeUnknown   it may or may not have happened: read back first
"""

from __future__ import annotations

__all__ = ["Conflict", "MeshmarkError", "OutcomeUnknown", "Permanent", "Poison", "Transient", "Waiting"]


class MeshmarkError(Exception):
    """Base of all. The text says what failed, on what, and what to do.

    `key` is that of the object which was refused, where several are written at once and it is known which; else empty.
    """

    key: str = ""


class Transient(MeshmarkError):
    """Failed for now. Worth trying again after `retry_after_s` seconds."""

    def __init__(self, text: str, retry_after_s: float = 0.5) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Waiting(MeshmarkError):
    """Cannot be done before something else happens; `waiting_for` says what, as ``link eth1``."""

    def __init__(self, text: str, waiting_for: str) -> None:
        super().__init__(text)
        self.waiting_for = waiting_for


class Permanent(MeshmarkError):
    """Will fail again with the same input."""


class Poison(Permanent):
    """A message that cannot be understood. It goes to the dead letters with this text."""


class Conflict(MeshmarkError):
    """Somebody else owns the object, or was first to write it."""


class OutcomeUnknown(MeshmarkError):
    """The request may have taken effect; read back before trying again."""
