"""UDP ports in use and their owners, from a /proc of files."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from services.kernel.survey.ports import in_use
from services.kernel.survey.values import PortSeen

HEADER = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n"


def line(address: str, port: int, inode: int) -> str:
    return f"  12: {address}:{port:04X} 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 {inode} 2 ffff 0\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    net = tmp_path / "thread-self/net"
    net.mkdir(parents=True)
    (net / "udp").write_text(HEADER + line("00000000", 4789, 11) + line("0100007F", 53, 12))
    (net / "udp6").write_text(HEADER + line("0" * 32, 51840, 13))
    (tmp_path / "77/fd").mkdir(parents=True)
    (tmp_path / "77/comm").write_text("dnsmasq\n")
    (tmp_path / "77/fd/3").symlink_to("socket:[13]")
    (tmp_path / "77/fd/4").symlink_to("/dev/null")
    (tmp_path / "78").mkdir()
    return tmp_path


def test_wanted_ports_are_found_with_their_process(proc: Path):
    """Of both families; a socket without a process that can be seen has none."""
    assert in_use([51840, 4789, 4242], proc) == (PortSeen(4789, None), PortSeen(51840, "dnsmasq (77)"))


def test_a_kernel_without_ipv6_has_one_file(proc: Path):
    (proc / "thread-self/net/udp6").unlink()
    assert in_use([51840, 4789], proc) == (PortSeen(4789, None),)


def test_a_process_that_looks_is_seen_itself():
    """Of the files that it has open, the one that it looks into is gone when it asks where that leads."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        [seen] = in_use([port])
    assert seen.process is not None
    assert seen.process.endswith(f"({os.getpid()})")
