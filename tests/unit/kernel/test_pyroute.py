"""pyroute2 behind blocking calls: which errors come out, when a dump is repeated, what is decoded, from which threads it may be called."""

from __future__ import annotations

import asyncio
import errno
import struct
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from pyroute2.netlink import nlmsg
from pyroute2.netlink.exceptions import NetlinkError as LibraryError
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from services.kernel import pyroute
from services.kernel.links import _LINK
from services.kernel.netlink import NetlinkError
from services.kernel.pyroute import Connection, Library, Message

DISTURBED, DONE = 0x10, 3


@pytest.fixture
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.close()


class FakeSocket:
    """What a connection uses of a pyroute2 socket. `passes` are the flags and the end's code of each dump."""

    def __init__(self, work: Callable[[], object] = list, passes: tuple[tuple[int, int], ...] = ()) -> None:
        self.work = work
        self.passes = list(passes)
        self.closed = False

    async def setup_endpoint(self) -> None:
        pass

    async def link(self) -> object:
        result = self.work()
        return await result if asyncio.iscoroutine(result) else result

    async def nlm_request(
        self, _message: nlmsg, msg_type: int, msg_flags: int, callback: Callable[[nlmsg], None]
    ) -> AsyncIterator[dict[str, int]]:
        assert (msg_type, msg_flags) == (7, 0x301)
        flags, code = self.passes.pop(0)
        end = nlmsg(struct.pack("=IHHIIi", 20, DONE, flags, 1, 0, -code))
        end.decode()
        callback(end)

        async def answers() -> AsyncIterator[dict[str, int]]:
            yield {"pass": len(self.passes)}

        return answers()

    def close(self) -> None:
        self.closed = True


def refuse(error: Exception) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


@pytest.mark.parametrize(
    "error,number,text",
    [
        (LibraryError(errno.EEXIST, "the kernel's words"), errno.EEXIST, "the kernel's words"),
        (LibraryError(errno.ENODEV), errno.ENODEV, "No such device"),
        (OSError(errno.ENOBUFS, "gone"), errno.ENOBUFS, "gone"),
    ],
)
def test_every_error_is_one_of_netlink(library: Library, error: Exception, number: int, text: str) -> None:
    """The number and the kernel's own words come through."""
    connection = Connection(library, lambda: FakeSocket(refuse(error)))
    with pytest.raises(NetlinkError) as caught:
        connection.call("link")
    assert (caught.value.errno, caught.value.text) == (number, text)


def test_a_socket_without_an_answer_is_made_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late answer must not be taken for the next request's: the socket goes, and the next call has a new one."""
    monkeypatch.setattr(pyroute, "_TIMEOUT_S", 0.01)
    sockets = [FakeSocket(asyncio.Event().wait), FakeSocket()]
    left = iter(sockets)
    connection = Connection(library, lambda: next(left))
    with pytest.raises(NetlinkError) as caught:
        connection.call("link")
    assert caught.value.errno == errno.ETIMEDOUT
    assert connection.call("link") == []
    assert [item.closed for item in sockets] == [True, False]


def test_a_refused_request_keeps_the_socket(library: Library) -> None:
    made = FakeSocket(refuse(LibraryError(errno.EINVAL)))
    connection = Connection(library, lambda: made)
    for _ in range(2):
        with pytest.raises(NetlinkError):
            connection.call("link")
    assert not made.closed


def test_a_disturbed_dump_is_repeated(library: Library) -> None:
    """Only the last, quiet pass counts."""
    made = FakeSocket(passes=((DISTURBED, 0), (DISTURBED, 0), (0, 0), (0, 0)))
    [found] = Connection(library, lambda: made).dump(nlmsg, 7)
    assert found.field("pass") == 1


@pytest.mark.parametrize("passes,number", [([(DISTURBED, 0)] * 8, errno.EINTR), ([(0, errno.EMSGSIZE)], errno.EMSGSIZE)])
def test_a_dump_that_is_not_whole_is_an_error(library: Library, passes: list[tuple[int, int]], number: int) -> None:
    """Disturbed to the end, or broken off by the kernel: never a part for the whole."""
    connection = Connection(library, lambda: FakeSocket(passes=tuple(passes)))
    with pytest.raises(NetlinkError) as caught:
        connection.dump(nlmsg, 7)
    assert caught.value.errno == number


async def test_calls_work_where_an_event_loop_runs(library: Library) -> None:
    """Services make their kernel in the thread of their own loop, and call it from another."""
    connection = Connection(library, FakeSocket)
    assert connection.call("link") == []
    assert await asyncio.to_thread(connection.call, "link") == []


async def test_every_answer_moves_the_time_limit() -> None:
    """A table of any size may be read, as long as the kernel is not silent."""
    answer = nlmsg(struct.pack("=IHHII", 16, 24, 0, 1, 0))
    answer.decode()
    async with asyncio.timeout(1) as limit:
        await asyncio.sleep(0)
        watch = pyroute._Watch(limit)
        watch(answer)
        assert limit.when() == pytest.approx(asyncio.get_running_loop().time() + pyroute._TIMEOUT_S, abs=5)
    assert (watch.is_disturbed, watch.code) == (False, 0)


def test_closing_twice_is_allowed() -> None:
    made = FakeSocket()
    library = Library()
    Connection(library, lambda: made).call("link")
    library.close()
    library.close()
    assert made.closed


def test_only_chosen_attributes_are_decoded() -> None:
    """The others of a link are neither looked at nor there; those that are chosen read as the library's own class reads them."""
    vxlan = [["IFLA_VXLAN_ID", 7], ["IFLA_VXLAN_TTL", 9], ["IFLA_VXLAN_LOCAL", "192.0.2.1"], ["IFLA_VXLAN_PORT", 4789]]
    sent = ifinfmsg()
    sent["index"] = 3
    sent["attrs"] = [
        ["IFLA_TXQLEN", 1000],
        ["IFLA_IFNAME", "mo.1"],
        ["IFLA_LINKINFO", {"attrs": [["IFLA_INFO_KIND", "vxlan"], ["IFLA_INFO_DATA", {"attrs": vxlan}]]}],
        ["IFLA_GROUP", 0],
    ]
    sent.encode()
    received = _LINK(sent.data)
    received.decode()
    message = Message(received)
    assert (message.field("index"), message.text("IFLA_IFNAME"), message.has("IFLA_TXQLEN")) == (3, "mo.1", False)
    info = message.inner("IFLA_LINKINFO")
    data = info.inner("IFLA_INFO_DATA")
    assert info.text("IFLA_INFO_KIND") == "vxlan"
    assert (data.number("IFLA_VXLAN_ID"), data.text("IFLA_VXLAN_LOCAL"), data.number("IFLA_VXLAN_PORT")) == (7, "192.0.2.1", 4789)
    assert not data.has("IFLA_VXLAN_TTL")
    assert data.text("IFLA_VXLAN_GROUP") == ""
