"""How the command reaches NATS, and what it says when it does not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from services.cli.session import Nats
from services.runtime.errors import Permanent, Transient


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As nats-server does to a user that it does not know."""
    writer.write(b'INFO {"server_id":"x","version":"2.12.0","headers":true,"max_payload":1048576,"auth_required":true}\r\n')
    await reader.readline()
    writer.write(b"-ERR 'Authorization Violation'\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("user, who", [("publisher", "publisher with this password"), ("", "clients without credentials")])
async def test_wrong_credentials_are_named(tmp_path: Path, user: str, who: str, monkeypatch):
    monkeypatch.delenv("MESHMARK_CREDENTIALS", raising=False)
    file = tmp_path / "creds.json"
    file.write_text(f'{{"user": "{user}", "password": "no"}}')
    file.chmod(0o600)
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Permanent, match=f"does not take {who}; give --credentials"):
            async with Nats(f"nats://127.0.0.1:{port}", str(file) if user else None).connect():
                pass


async def test_a_server_that_is_not_there_is_said_so_within_seconds():
    started = time.monotonic()
    with pytest.raises(Transient, match="is the server running there"):
        async with Nats("nats://127.0.0.1:1").connect():
            pass
    assert time.monotonic() - started < 7
