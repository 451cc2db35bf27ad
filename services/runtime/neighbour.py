"""Requests between the services of one host, without the broker: what cuts a host off from NATS must not keep it from being repaired.

The place is an abstract Unix socket: one per network namespace, and the kernel frees it with the process. One connection carries one
request: a line with the verb, then the body up to the end of what is sent; back come a line, ``ok`` or ``error``, and the answer or
the reason.
Only root and the server's own user are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import structlog

from services.runtime import tasks
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Waiting

APPLIER = "\0meshmark-applier"
"""Where the applier of a network namespace answers; nobody can be there twice."""

Handler = Callable[[bytes], Awaitable[bytes]]

_OK, _ERROR = b"ok\n", b"error\n"
_REQUEST_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("3i")

log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def serving(handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
    """Be this network namespace's applier and answer requests while the body runs. Raises Conflict when there is one already.

    A request that is still open when the body ends gets no answer.
    """
    answering: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whoever asked may be gone by now.
        with contextlib.suppress(OSError, TimeoutError):
            async with _closed(writer):
                if _is_allowed(writer.get_extra_info("socket")):
                    async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                        request = await reader.read(-1)
                    writer.write(await _answer(handlers, request))
                    await writer.drain()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(answer(reader, writer), name="neighbour")
        answering.add(task)
        task.add_done_callback(ended)

    def ended(task: asyncio.Task[None]) -> None:
        answering.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request_crashed", exc_info=error)

    try:
        server = await asyncio.start_unix_server(accept, APPLIER)
    except OSError as error:
        msg = "another applier serves this network namespace; stop it first"
        raise Conflict(msg) from error
    try:
        async with server:
            yield
    finally:
        await tasks.end(answering)


async def ask(verb: str, body: bytes = b"", timeout_s: float = 600.0) -> bytes:
    """The answer of this network namespace's applier.

    Waiting when nobody is there, Permanent with its own text when it refuses, OutcomeUnknown when it ended, or took too long to answer.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(APPLIER)
    except OSError as error:
        msg = "no applier serves this network namespace; is it running?"
        raise Waiting(msg, "the applier") from error
    try:
        async with _closed(writer), asyncio.timeout(timeout_s):
            writer.write(verb.encode() + b"\n" + body)
            writer.write_eof()
            answer = await reader.read(-1)
    except (OSError, TimeoutError) as error:
        msg = f"the applier gave no answer to {verb}: {str(error) or 'too late'}"
        raise OutcomeUnknown(msg) from error
    if answer.startswith(_ERROR):
        raise Permanent(answer.removeprefix(_ERROR).decode())
    if not answer.startswith(_OK):
        msg = f"the applier ended before it answered to {verb}"
        raise OutcomeUnknown(msg)
    return answer.removeprefix(_OK)


@contextlib.asynccontextmanager
async def _closed(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Close the connection at the end of the body, and see it closed."""
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _answer(handlers: Mapping[str, Handler], request: bytes) -> bytes:
    verb, _, body = request.partition(b"\n")
    handler = handlers.get(verb.decode(errors="replace"))
    if handler is None:
        return _ERROR + f"no such request; there are {', '.join(sorted(handlers))}".encode()
    try:
        return _OK + await handler(body)
    except MeshmarkError as error:
        log.info("request_refused", verb=verb.decode(), error=str(error))
        return _ERROR + str(error).encode()


def _is_allowed(peer: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user in (0, os.geteuid())
