"""pyroute2 for blocking code: its sockets in one thread of ours, its errors as ours, its messages with types.

Owns a thread with an event loop, and the netlink sockets in it. pyroute2 opens a socket for every thread that calls it, in the network
namespace of that thread, and its blocking classes cannot be used where an event loop runs. So its asynchronous classes run here, in a
thread that is started by the constructor: it is in the network namespace of the thread that made the object, whoever calls later, and one
socket is kept for each protocol. The library is untyped; what leaves this module is not.

The kernel has a time limit for each answer, however many there are. A socket that timed out or broke is closed, since late answers would
be taken for those of the next request; the next one opens it again. Dumps are repeated while the kernel says that they were disturbed.
Fails with `NetlinkError`.
"""

from __future__ import annotations

import asyncio
import errno
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from pyroute2.netlink import NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE
from pyroute2.netlink.exceptions import NetlinkError as LibraryError

from services.kernel.netlink import NetlinkError

T = TypeVar("T")

_TIMEOUT_S = 10.0
_DUMP_TRIES = 8
_ATTRIBUTE = struct.Struct("=HH")
_DONE_CODE = struct.Struct("=i")
_HEADER_BYTES = 16
_TYPE_MASK = 0x3FFF


class Library:
    """The thread that all of one kernel's pyroute2 sockets live in."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._connections: list[Connection] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="pyroute2", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, run in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def add(self, connection: Connection) -> None:
        """Have a connection closed with the rest."""
        self._connections.append(connection)

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._loop.is_closed():
            return
        for connection in self._connections:
            connection.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Connection:
    """One pyroute2 socket, made by `make` on first use and kept."""

    def __init__(self, library: Library, make: Callable[[], Any], prepare: Callable[[Any], Awaitable[None]] | None = None) -> None:
        self._library = library
        self._make = make
        self._prepare = prepare
        self._socket: Any = None
        library.add(self)

    def call(self, method: str, *arguments: object, **options: object) -> list[Message]:
        """Call one of the socket's own methods; its answers, if it gives any."""
        return self._library.run(self._guarded(lambda _: self._called(method, arguments, options)))

    def ask(self, message: Callable[[], Any], kind: int, flags: int) -> list[Message]:
        """Send a message of the library that its methods do not make."""
        return self._library.run(self._guarded(lambda watch: self._asked(message(), kind, flags, watch)))

    def dump(self, message: Callable[[], Any], kind: int | None = None) -> list[Message]:
        """All objects of a table, from one undisturbed pass. `kind` is by default that of the socket's generic netlink family."""
        return self._library.run(self._guarded(lambda watch: self._dumped(message, kind, watch)))

    def close(self) -> None:
        self._library.run(self._close())

    async def _guarded(self, work: Callable[[_Watch], Awaitable[T]]) -> T:
        """Do the work over an open socket; every error, and silence, is a `NetlinkError`."""
        try:
            async with asyncio.timeout(_TIMEOUT_S) as limit:
                await self._open()
                return await work(_Watch(limit))
        except LibraryError as error:
            raise NetlinkError(error.code, str(error.args[1])) from error
        except TimeoutError as error:
            await self._close()
            raise NetlinkError(errno.ETIMEDOUT, "no answer from the kernel") from error
        except NetlinkError:
            raise
        except OSError as error:  # of the socket itself, which pyroute2 does not use again
            await self._close()
            raise NetlinkError(error.errno or errno.EIO, error.strerror or str(error)) from error

    async def _open(self) -> None:
        if self._socket is not None:
            return
        self._socket = self._make()
        try:
            await self._socket.setup_endpoint()
            if self._prepare is not None:
                await self._prepare(self._socket)
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        await asyncio.sleep(0)  # the transport lets go of the socket in the loop's next turn

    async def _called(self, method: str, arguments: tuple[object, ...], options: dict[str, object]) -> list[Message]:
        answers = await getattr(self._socket, method)(*arguments, **options)
        return [Message(answer) for answer in answers] if isinstance(answers, list | tuple) else []

    async def _asked(self, message: Any, kind: int, flags: int, watch: _Watch) -> list[Message]:  # noqa: ANN401 - the library's
        answers = await self._socket.nlm_request(message, msg_type=kind, msg_flags=flags, callback=watch)
        return [Message(answer) async for answer in answers]

    async def _dumped(self, message: Callable[[], Any], kind: int | None, watch: _Watch) -> list[Message]:
        for _ in range(_DUMP_TRIES):
            watch.is_disturbed = False
            found = await self._asked(message(), self._socket.prid if kind is None else kind, NLM_F_REQUEST | NLM_F_DUMP, watch)
            if watch.code:
                raise NetlinkError(watch.code)
            if not watch.is_disturbed:
                return found
        raise NetlinkError(errno.EINTR, f"{_DUMP_TRIES} dumps in a row were disturbed by writers")


class _Watch:
    """What pyroute2 does not look at: the flag of a disturbed dump, and the error at the end of one that broke off.

    Every answer moves the time limit: a table of a hundred thousand entries takes longer than a kernel may be silent.
    """

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self.is_disturbed = False
        self.code = 0

    def __call__(self, message: Any) -> None:  # noqa: ANN401 - the library's
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + _TIMEOUT_S)
        self.is_disturbed |= bool(message["header"]["flags"] & NLM_F_DUMP_INTR)
        if message["header"]["type"] == NLMSG_DONE and message["header"]["length"] >= _HEADER_BYTES + _DONE_CODE.size:
            self.code = max(0, -_DONE_CODE.unpack_from(message.data, message.offset + _HEADER_BYTES)[0])


class Message:
    """A message or an attribute with members, as pyroute2 decoded it. What is absent reads as empty, or as 0."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Any) -> None:  # noqa: ANN401 - the library's
        self._raw = raw

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def field(self, name: str) -> int:
        """A field of the message's fixed part."""
        return int(self._raw[name])

    def field_text(self, name: str) -> str:
        return str(self._raw[name])

    def number(self, name: str) -> int:
        return int(self._get(name) or 0)

    def text(self, name: str) -> str:
        value = self._get(name) or ""
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def record(self, name: str) -> dict[str, Any]:
        """The named fields of a structure."""
        return self._get(name) or {}

    def inner(self, name: str) -> Message:
        return Message(self._get(name))

    def inners(self, name: str) -> list[Message]:
        """The members of an array."""
        return [Message(item) for item in self._get(name) or ()]

    def _get(self, name: str) -> Any:  # noqa: ANN401 - the library's
        # An attribute of a kind that pyroute2 has no class for is text there.
        return self._raw.get_attr(name) if hasattr(self._raw, "get_attr") else None


class _Choosing:
    """Beside a pyroute2 class: decodes the chosen attributes alone. Objects for all 60 of a link cost ten times what is in them."""

    chosen: frozenset[int]
    data: bytes
    offset: int
    length: int

    def decode_nlas(self, offset: int) -> None:
        """The library's hook between the fixed part and the attributes."""
        end, kept = self.offset + self.length, []
        while offset + _ATTRIBUTE.size <= end:
            length, kind = _ATTRIBUTE.unpack_from(self.data, offset)
            if length < _ATTRIBUTE.size:
                break
            step = (length + 3) & ~3
            if kind & _TYPE_MASK in self.chosen:
                kept.append(self.data[offset : offset + step])
            offset += step
        self.data, self.offset = b"".join(kept), 0
        self.length = len(self.data)
        super().decode_nlas(0)  # type: ignore[misc]


def choosing(base: Any, names: Iterable[str], **members: object) -> Any:  # noqa: ANN401 - the library's
    """A pyroute2 class of messages or attributes that decodes only these attributes."""
    numbers = {item[0]: number for number, item in enumerate(base.nla_map)}
    made = type(base.__name__, (_Choosing, base), {"chosen": frozenset(numbers[name] for name in names), **members})
    made().compile_nla_table()  # it would be the base's otherwise, without `members`
    return made
