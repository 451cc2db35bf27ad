"""WireGuard in userspace: wireguard-go, spoken to over its UAPI socket.

Owns the process ``wireguard-go NAME``, which lives apart from this one and dies with its device. Its socket is
/var/run/wireguard/NAME.sock, found by name after a restart; that folder is shared by all network namespaces, so a name that another
namespace uses is a Conflict, never taken over. UAPI is not transactional: of a refused message the lines before the bad one hold, so
callers validate, diff and read again. Fails with OSError; the answer's own errno is kept.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.kernel.wireguard_device import DeviceState, PeerChange, PeerState, Settings

_FOLDER = Path("/var/run/wireguard")
_PROGRAM = "wireguard-go"
_TIMEOUT_S = 5.0
_START_S = 10.0
_POLL_S = 0.01
_GONE = (errno.ENOENT, errno.ECONNREFUSED, errno.ENODEV)
_NO_INOTIFY = (
    "wireguard-go needs an inotify instance for each device, and this user's are used up: raise the sysctl fs.inotify.max_user_instances"
)


class Userspace:
    """Devices of wireguard-go. `link_exists` says whether this namespace has a link of that name."""

    def __init__(self, link_exists: Callable[[str], bool]) -> None:
        self._link_exists = link_exists

    @staticmethod
    def is_available() -> bool:
        return shutil.which(_PROGRAM) is not None and Path("/dev/net/tun").exists()

    def create(self, name: str) -> None:
        """Start the program and wait until its socket answers."""
        if not _waited(lambda: not self._answers(name), _TIMEOUT_S):
            raise OSError(errno.EEXIST, f"{socket_path(name)} is in use by another network namespace; use names that differ")
        environment = {**os.environ, "LOG_LEVEL": "silent", "WG_I_PREFER_BUGGY_USERSPACE_TO_POLISHED_KMOD": "1"}
        quiet = subprocess.DEVNULL
        done = subprocess.run(
            [_PROGRAM, name],
            env=environment,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
            timeout=_START_S,
            check=False,
        )
        if done.returncode:
            raise OSError(errno.EIO, f"{_PROGRAM} {name} ended with code {done.returncode}; is /dev/net/tun there and allowed?")
        if not _waited(lambda: self._answers(name) and self._link_exists(name), _START_S):
            why = f"; {_NO_INOTIFY}" if _inotify_is_used_up() else ""
            raise OSError(errno.ETIMEDOUT, f"{socket_path(name)} did not appear within {_START_S:g} s{why}")

    def get(self, name: str) -> DeviceState:
        return decode_device(self._talk(name, "get=1\n\n"))

    def set(self, name: str, settings: Settings, peers: Sequence[PeerChange]) -> None:
        self._talk(name, encode_changes(settings, peers))

    def _answers(self, name: str) -> bool:
        try:
            self._talk(name, "get=1\n\n")
        except OSError as error:
            # Reset: it ended while it was asked, as one does that cannot start.
            if error.errno in (*_GONE, errno.ECONNRESET):
                return False
            raise
        return True

    @staticmethod
    def _talk(name: str, request: str) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(socket_path(name)))
            connection.sendall(request.encode())
            answer = b""
            while not answer.endswith(b"\n\n"):
                part = connection.recv(1 << 16)
                if not part:
                    raise OSError(errno.ECONNRESET, f"{_PROGRAM} {name} closed its socket")
                answer += part
        text = answer.decode()
        number = int(next((line[6:] for line in text.splitlines() if line.startswith("errno=")), "0"))
        if number:
            raise OSError(abs(number), os.strerror(abs(number)))
        return text


def serves(process: str, name: str) -> bool:
    """Whether a process, called ``name (number)`` as the survey has it, is the wireguard-go of this device. It keeps its command line."""
    try:
        words = Path("/proc", process.rpartition("(")[2].rstrip(")"), "cmdline").read_bytes().split(b"\0") if process else []
    except OSError:
        return False
    return [Path(word.decode(errors="replace")).name for word in words[:2]] == [_PROGRAM, name]


def socket_path(name: str) -> Path:
    return _FOLDER / f"{name}.sock"


def encode_changes(settings: Settings, peers: Sequence[PeerChange]) -> str:
    """A UAPI set message."""
    lines = ["set=1"]
    if settings.private_key is not None:
        lines.append(f"private_key={settings.private_key.hex()}")
    if settings.listen_port is not None:
        lines.append(f"listen_port={settings.listen_port}")
    if settings.fwmark is not None:
        lines.append(f"fwmark={settings.fwmark}")
    for peer in peers:
        lines.append(f"public_key={peer.public_key.hex()}")
        if peer.remove:
            lines.append("remove=true")
            continue
        if peer.endpoint:
            lines.append(f"endpoint={peer.endpoint}")
        if peer.keepalive_seconds is not None:
            lines.append(f"persistent_keepalive_interval={peer.keepalive_seconds}")
        lines += [f"allowed_ip={prefix}" for prefix in sorted(peer.allowed_ips)]
    return "\n".join(lines) + "\n\n"


def decode_device(text: str) -> DeviceState:
    """A UAPI answer to get=1. The private key is given, not the public one."""
    private, port, fwmark = b"", 0, 0
    peers: dict[bytes, PeerState] = {}
    fields: dict[str, str] = {}
    prefixes: set[str] = set()
    current = b""
    for line in (*text.splitlines(), "public_key="):
        name, _, value = line.partition("=")
        match name:
            case "private_key":
                private = bytes.fromhex(value)
            case "listen_port":
                port = int(value)
            case "fwmark":
                fwmark = int(value)
            case "public_key":
                if current:
                    peers[current] = _peer(fields, prefixes)
                current, fields, prefixes = bytes.fromhex(value), {}, set()
            case "allowed_ip":
                prefixes.add(value)
            case _:
                fields[name] = value
    return DeviceState(private if any(private) else b"", b"", port, peers, fwmark)


def _peer(fields: dict[str, str], prefixes: set[str]) -> PeerState:
    handshake = int(fields.get("last_handshake_time_sec", "0")) + int(fields.get("last_handshake_time_nsec", "0")) / 1e9
    return PeerState(
        fields.get("endpoint", ""),
        frozenset(prefixes),
        int(fields.get("persistent_keepalive_interval", "0")),
        handshake,
        int(fields.get("rx_bytes", "0")),
        int(fields.get("tx_bytes", "0")),
    )


def _inotify_is_used_up() -> bool:
    """Whether this user can have no more inotify instances: of all that ends wireguard-go as it starts, what it tells nobody."""
    library = ctypes.CDLL(None, use_errno=True)
    instance = library.inotify_init1(os.O_CLOEXEC)
    if instance < 0:
        return ctypes.get_errno() == errno.EMFILE
    os.close(instance)
    return False


def _waited(condition: Callable[[], bool], limit_s: float) -> bool:
    """True as soon as the condition holds, False when it did not within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True
