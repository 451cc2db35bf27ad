"""A real nats-server per test, on a free port, and brokers connected to it by the name of the user."""

import contextlib

import pytest

from services.runtime.accounts import HostUsers, ServerConfig, host_user
from services.runtime.broker import Broker, BrokerSettings
from services.runtime.server import Server

HOST_A, HOST_B = ("rome", "ip-10-0-0-1.ec2.internal"), ("rome", "node-b")


def host_users(cluster, host):
    return HostUsers(cluster, host, applier=f"applier of {host}", auditor=f"auditor of {host}")


@pytest.fixture
def config(tmp_path):
    return ServerConfig(
        port=-1,
        store_dir=str(tmp_path / "streams"),
        planner='with "quotes" and $dollars',
        publisher="publisher's",
        reader="reader's",
        system="system's",
        hosts=(host_users(*HOST_A), host_users(*HOST_B)),
        anonymous="publisher",
    )


@pytest.fixture
def server(config, tmp_path):
    with Server(config, tmp_path / "server") as running:
        yield running


@pytest.fixture
async def connect(server, config):
    """Open brokers by user name (``planner``, ``publisher``, ``reader``, ``anonymous`` or a role and a host); closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_broker(who, host=None, **changes):
            if host is not None:
                user = host_user(who, *host)
                password = f"{who} of {host[1]}"
            else:
                user = "" if who == "anonymous" else who
                password = getattr(config, who, "")
            settings = BrokerSettings(url=server.url, user=user, password=password, connect_s=5.0, reconnect_wait_s=0.05, **changes)
            return await stack.enter_async_context(Broker.connect(settings, who))

        yield open_broker


@pytest.fixture
async def planner(connect):
    broker = await connect("planner")
    await broker.ensure_streams()
    return broker
