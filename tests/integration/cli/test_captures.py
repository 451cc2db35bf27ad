"""Captures in a namespace where another link is busy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.lab import namespaces
from services.cli.lab.captures import capture
from tests.contract.kernel.machines import LinuxMachine

pytestmark = pytest.mark.privileged

WORDS = b"hello"
OPENED = 60
"""Of so many captures that heard all links for a moment, some held a packet of the busy one each time that this was tried."""


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[str]:
    """A namespace with a link where nothing passes, and packets to itself all the time."""
    machine, ended = LinuxMachine(tmp_path), threading.Event()
    try:
        machine.run("ip link set lo up; ip link add quiet type bridge; sysctl -qw net.ipv6.conf.quiet.disable_ipv6=1; ip link set quiet up")
        with namespaces.inside(machine.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
            speaker = threading.Thread(target=_speak, args=(sender, ended), name="speaker")
            speaker.start()
            yield machine.namespace
            ended.set()
            speaker.join()
    finally:
        machine.close()


def _speak(sender: socket.socket, ended: threading.Event) -> None:
    while not ended.is_set():
        sender.sendto(WORDS, ("127.0.0.1", 9))


def test_what_passes_another_link_is_in_no_capture(namespace: str) -> None:
    """Also of the moment when it begins: one that heard all links until it was bound to its own told of a packet in clear that was not."""
    found = []
    for _ in range(OPENED):
        with capture(namespace, "quiet") as packets:
            pass
        found += [packet for packet in packets if WORDS in packet.body]
    assert found == []
