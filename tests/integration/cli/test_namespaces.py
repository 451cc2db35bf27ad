"""Sockets made in a namespace from outside."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.cli.lab import namespaces
from tests.contract.kernel.machines import LinuxMachine

pytestmark = pytest.mark.privileged


def test_a_socket_that_cannot_be_bound_is_closed(tmp_path: Path) -> None:
    """An address that is not there yet is refused by the kernel; what was opened for it does not wait for a collector of garbage."""
    machine, open_files = LinuxMachine(tmp_path), Path("/proc/self/fd")
    try:
        before = set(open_files.iterdir())
        with pytest.raises(OSError, match="Cannot assign requested address"):
            namespaces.bound_socket(machine.namespace, socket.AF_INET, socket.SOCK_STREAM, ("203.0.113.9", 0))
        assert set(open_files.iterdir()) == before
    finally:
        machine.close()
