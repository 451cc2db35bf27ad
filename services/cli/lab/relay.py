"""The way from the machine's own network namespace to the broker in the underlay: a TCP relay on 127.0.0.1.

The broker must listen where the hosts reach it, in ``mm.underlay``, which has no link to the machine. The relay accepts on a free port
of 127.0.0.1 and connects to the same port of 127.0.0.1 in the underlay by a socket that was made there, so that one URL is right in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from services.cli.lab import namespaces
from services.runtime import tasks

_CHUNK_BYTES = 256 * 1024
_HOME = "127.0.0.1"


class Relay:
    """Accepts from construction's port on once started; `stop` ends every connection and comes back when all are closed."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._listener = socket.create_server((_HOME, 0))
        self.port: int = self._listener.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._listener, limit=_CHUNK_BYTES)

    async def stop(self) -> None:
        """Stop accepting, cut what is connected. Stopping twice, or before the start, is fine."""
        if self._server is None:
            self._listener.close()
            return
        self._server.close()
        await tasks.end(self._connections)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # `stop` waits for this task; asyncio would report the cancellation of a connection as an error
        finally:
            self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry bytes both ways until either side ends. A broker that is not there looks like one that hangs up at once."""
        try:
            far_reader, far_writer = await self._connect()
        except OSError:
            writer.close()
            return
        copies = [asyncio.ensure_future(_copy(reader, far_writer)), asyncio.ensure_future(_copy(far_reader, writer))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            # Closing, not aborting: the last words of one side, such as the broker's reason, still reach the other.
            for side in (writer, far_writer):
                side.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made = namespaces.inside(self._namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            made.setblocking(False)  # noqa: FBT003 - positional in the standard library
            await asyncio.get_running_loop().sock_connect(made, (_HOME, self.port))
            return await asyncio.open_connection(sock=made, limit=_CHUNK_BYTES)
        except BaseException:
            made.close()
            raise


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
