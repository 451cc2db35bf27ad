"""TCP streams between two network namespaces: how long it takes them to carry so many bytes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator, Sequence

from services.cli.lab import namespaces
from services.runtime.errors import Transient

STREAMS = 6
_SEGMENT_BYTES = 1200
"""The same for all that is compared, and small enough for every tunnel: headers would else make a difference."""
_CHUNK = bytes(1 << 17)
_PATIENCE_S = 30.0
_STEADY = (("ipv4/tcp_slow_start_after_idle", "0"), ("ipv4/tcp_no_metrics_save", "1"))


class Streams:
    """Established connections, from their client's end to their server's."""

    def __init__(self, pairs: Sequence[tuple[socket.socket, socket.socket]]) -> None:
        self._pairs = pairs

    def carry(self, count_bytes: int) -> float:
        """Seconds until so many bytes, which the streams share as they can, have all arrived. Transient when they do not."""
        left, unread = count_bytes, count_bytes
        taken = bytearray(len(_CHUNK))
        with selectors.DefaultSelector() as ready:
            for sender, receiver in self._pairs:
                ready.register(sender, selectors.EVENT_WRITE)
                ready.register(receiver, selectors.EVENT_READ)
            began_s = time.perf_counter()
            while unread:
                if not (events := ready.select(_PATIENCE_S)):
                    msg = f"nothing has arrived for {_PATIENCE_S:.0f} s"
                    raise Transient(msg)
                for key, mask in events:
                    opened = key.fileobj
                    assert isinstance(opened, socket.socket)
                    if mask == selectors.EVENT_READ:
                        unread -= opened.recv_into(taken)
                    elif left:
                        left -= opened.send(_CHUNK[: min(left, len(_CHUNK))])
                    else:
                        ready.unregister(opened)
            return time.perf_counter() - began_s


@contextlib.contextmanager
def opened(client: str, server: str, address: str) -> Iterator[Streams]:
    """Streams from the namespace `client` to `server`, dialled as `address`."""
    for namespace in (client, server):
        namespaces.set_sysctls(namespace, _STEADY)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(namespaces.inside(server, _socket))
        listener.bind(("", 0))
        listener.listen(STREAMS)
        pairs = []
        for _ in range(STREAMS):
            near = stack.enter_context(namespaces.inside(client, _socket))
            near.connect((address, listener.getsockname()[1]))
            far = stack.enter_context(listener.accept()[0])
            pairs.append((near, far))
        for near, far in pairs:
            near.setblocking(False)  # noqa: FBT003 - positional in the standard library
            far.setblocking(False)  # noqa: FBT003 - as above
        yield Streams(pairs)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.settimeout(_PATIENCE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
    return made
