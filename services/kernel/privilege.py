"""What this process may do, as the kernel tells it in /proc. A right in a user namespace may still not reach a network namespace."""

from __future__ import annotations

from pathlib import Path

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
_STATUS = Path("/proc/self/status")


def has_capability(number: int, status: Path = _STATUS) -> bool:
    """Whether the process holds a capability (its number in linux/capability.h) in its effective set."""
    line = next(line for line in status.read_text(encoding="ascii", errors="replace").splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> number & 1)
