"""A service as a process runs it: start, signals, failures, exit codes."""

import asyncio
import os
import signal
import socket
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import structlog

from services.runtime import service
from services.runtime.connection import Connection
from services.runtime.errors import Permanent
from services.runtime.settings import Settings


@pytest.fixture
def settings(server, tmp_path):
    file = tmp_path / "credentials.json"
    file.touch(0o600)
    file.write_text(f'{{"user": "publisher", "password": "{server.config.publisher}"}}')
    return Settings(nats_url=server.url, credentials=str(file), http="127.0.0.1:0", shutdown_s=0.2, lost_after_s=0.2)


@pytest.fixture(autouse=True)
def logging_of_its_own():
    """A service sets up the process's logging; here many run in one process."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def read(url):
    """The body, whatever the status."""
    try:
        with urlopen(url) as answer:  # noqa: S310 - our own server
            return answer.read()
    except HTTPError as refused:
        with refused:
            return refused.read()


def test_sigterm_ends_a_service_that_finds_no_broker(monkeypatch):
    """Asked to end while it still looks for a broker, a service ends at once and with 0."""
    sought = []

    async def main(_):
        pytest.fail("there is no broker")

    async def seek(*_, **__):
        sought.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(Connection, "open", seek)
    assert service.run("test", Settings(nats_url="nats://127.0.0.1:1", http=""), main) == 0
    assert sought


def test_sigterm_is_a_clean_end(settings):
    """A service that is asked to end returns, and the exit code is 0; while it runs, it is ready and says so."""
    seen = {}

    async def main(context):
        context.ready("test")
        async with asyncio.timeout(5):
            seen["readyz"] = b""
            while b'"ready": true' not in seen["readyz"]:
                seen["readyz"] = await asyncio.to_thread(read, f"http://127.0.0.1:{context.port}/readyz")
        os.kill(os.getpid(), signal.SIGTERM)
        await context.stop.wait()

    assert service.run("test", settings, main) == 0
    assert b'"ready": true' in seen["readyz"]


def test_a_service_that_returns_ends_cleanly(settings):
    """Nothing else keeps the process once main has returned."""

    async def main(context):
        assert context.broker.connected

    assert service.run("test", settings, main) == 0


@pytest.mark.parametrize("error", [Permanent("no"), ZeroDivisionError("bug")])
def test_a_failure_is_exit_code_1(settings, error, capsys):
    """An error that gets out ends the service, is logged, and gives the exit code 1."""

    async def main(context):
        raise error

    assert service.run("test", settings, main) == 1
    assert str(error) in capsys.readouterr().err


def test_a_service_that_ignores_the_stop_is_cancelled(settings):
    """After `shutdown_s` main is cancelled, again when it swallows that once, and the end is clean."""
    cancels = []

    async def main(context):
        context.stop.set()
        while len(cancels) < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancels.append(1)

    assert service.run("test", settings, main) == 0
    assert len(cancels) == 2


def test_a_lost_broker_is_exit_code_1(settings, server, capsys):
    """When the broker stays away beyond the deadline, the process ends with a failure that names it."""

    async def main(context):
        server.kill()
        await context.stop.wait()

    assert service.run("test", settings, main) == 1
    assert "is lost" in capsys.readouterr().err


def test_systemd_is_told(monkeypatch, tmp_path):
    """READY=1 arrives at the notify socket; without one nothing happens."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    service.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        service.notify("READY=1")
        listener.settimeout(5)
        assert listener.recv(100) == b"READY=1"
