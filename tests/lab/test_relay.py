"""The way from the machine to the underlay."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from services.cli.lab import namespaces
from services.cli.lab.relay import Relay

pytestmark = pytest.mark.privileged
NAMESPACE = "mm.relay-test"


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    namespaces.script([f"netns add {NAMESPACE}"])
    namespaces.script(["link set lo up"], NAMESPACE)
    relay = Relay(NAMESPACE)
    await relay.start()
    yield relay
    await relay.stop()
    namespaces.remove([NAMESPACE])


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_bytes_go_both_ways_unchanged(relay: Relay):
    listener = namespaces.inside(NAMESPACE, lambda: socket.create_server(("127.0.0.1", relay.port)))
    sent = bytes(range(256)) * 4096
    async with asyncio.timeout(20), await asyncio.start_server(echo, sock=listener):
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        writer.close()
        await writer.wait_closed()


async def test_without_a_broker_it_hangs_up_at_once(relay: Relay):
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_stopping_ends_what_is_connected(relay: Relay):
    listener = namespaces.inside(NAMESPACE, lambda: socket.create_server(("127.0.0.1", relay.port)))
    async with asyncio.timeout(10), await asyncio.start_server(echo, sock=listener):
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        await relay.stop()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
