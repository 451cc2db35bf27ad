"""``meshmark planner``, ``applier``, ``auditor`` and ``server``: the processes."""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter

from services.cli.output import console, note
from services.runtime.accounts import PLANNER, PUBLISHER, READER, HostUsers, Role, ServerConfig, host_user
from services.runtime.errors import Permanent
from services.runtime.settings import Settings, load

ROLES: tuple[Role, ...] = ("applier", "auditor")


@Parameter(name="*")
@dataclass(frozen=True)
class Flags:
    """Settings of a service. Each is also an environment variable (MESHMARK_NATS_URL) and a key of the TOML file."""

    nats_url: Annotated[str | None, Parameter(help="NATS server, as nats://127.0.0.1:4222")] = None
    credentials: Annotated[str | None, Parameter(help='JSON file with {"user": …, "password": …}')] = None
    cluster: Annotated[str | None, Parameter(help="Cluster of this host (applier, auditor)")] = None
    host: Annotated[str | None, Parameter(help="Name of this host, as its Node or Gateway object (applier, auditor)")] = None
    state_dir: Annotated[str | None, Parameter(help="Folder for the private key and what is given back later")] = None
    http: Annotated[str | None, Parameter(help="Where /healthz, /readyz and /metrics are served; empty for nowhere")] = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_format: Literal["json", "console"] | None = None
    resync_s: Annotated[float | None, Parameter(help="Period of the auditor's full pass, in seconds")] = None
    config: Annotated[Path | None, Parameter(help="TOML file with settings")] = None

    def settings(self, environment: dict[str, str]) -> Settings:
        values = {name: value for name, value in vars(self).items() if name != "config"}
        config = self.config or (Path(environment["MESHMARK_CONFIG"]) if "MESHMARK_CONFIG" in environment else None)
        return load(config, environment, values)


def register(app: App) -> None:
    """Add the commands to the application."""
    app.command(planner)
    app.command(applier)
    app.command(auditor)
    app.command(server)


def planner(*, flags: Flags | None = None) -> int:
    """Run the planner: topology events in, plans for all hosts out. One at a time."""
    return _run("planner", flags)


def applier(*, flags: Flags | None = None) -> int:
    """Run the applier of this host: keeps the network namespace it is started in as the plan says. Needs CAP_NET_ADMIN."""
    return _run("applier", flags)


def auditor(*, flags: Flags | None = None) -> int:
    """Run the auditor of this host: compares the kernel with the plan and publishes drift. Needs CAP_NET_ADMIN to read."""
    return _run("auditor", flags)


def server(
    *,
    directory: Annotated[Path, Parameter(name=["--dir"], help="Folder for the store, the configuration and the credentials")],
    listen: Annotated[str, Parameter(help="Address and port to listen on")] = "127.0.0.1:4222",
    host: Annotated[list[str], Parameter(help="A host whose services may connect, as rome/gw; give it once per host", negative=())] = [],  # noqa: B006
    anonymous: Annotated[bool, Parameter(help="Treat clients without credentials as publishers", negative=())] = False,
) -> int:
    """Run the embedded nats-server with the accounts that meshmark needs, and write credentials for every user.

    Credentials are kept over restarts in DIR/creds: planner.json, publisher.json, reader.json, and for each host
    applier.CLUSTER.HOST.json and auditor.CLUSTER.HOST.json. To add a host, stop the server and start it again with one more --host.
    """
    server_module = importlib.import_module("services.runtime.server")
    config = server_config(directory, listen, host, anonymous=anonymous)
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with server_module.Server(config, directory / "nats") as running:
        console.print(f"nats-server at {running.url}, credentials in {directory / 'creds'}")
        while not stopping and running.pid is not None:
            time.sleep(0.2)
        if not stopping:
            msg = f"nats-server ended; see {running.log}"
            raise Permanent(msg)
    note("nats-server stopped")
    return 0


def server_config(directory: Path, listen: str, hosts: list[str], *, anonymous: bool) -> ServerConfig:
    """The server's configuration; passwords are read from the credentials folder, or made and written there."""
    address, _, port = listen.rpartition(":")
    if not address or not port.isdigit():
        msg = f"--listen {listen!r} is wrong; write it as address:port, as 127.0.0.1:4222"
        raise Permanent(msg)
    creds = directory / "creds"
    creds.mkdir(parents=True, exist_ok=True, mode=0o700)
    users = []
    for name in hosts:
        cluster, slash, host = name.partition("/")
        if not slash or not host:
            msg = f"--host {name!r} is wrong; write it as cluster/host, as rome/gw"
            raise Permanent(msg)
        applier_password, auditor_password = (
            _password(creds / f"{role}.{cluster}.{host}.json", host_user(role, cluster, host)) for role in ROLES
        )
        users.append(HostUsers(cluster, host, applier_password, auditor_password))
    (directory / "nats").mkdir(exist_ok=True)
    return ServerConfig(
        address=address,
        port=int(port),
        store_dir=str(directory / "nats" / "store"),
        planner=_password(creds / "planner.json", PLANNER),
        publisher=_password(creds / "publisher.json", PUBLISHER),
        reader=_password(creds / "reader.json", READER),
        system=secrets.token_urlsafe(24),
        hosts=tuple(users),
        anonymous=PUBLISHER if anonymous else None,
    )


def _password(file: Path, user: str) -> str:
    """The password in a credentials file, which is made when it is not there."""
    if file.exists():
        return str(msgspec.json.decode(file.read_bytes())["password"])
    password = secrets.token_urlsafe(24)
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode({"user": user, "password": password}))
    return password


def _run(service: str, flags: Flags | None) -> int:
    """Import and run one service: a planner needs no kernel, an applier no compiler."""
    runtime = importlib.import_module("services.runtime.service")
    module = importlib.import_module(f"services.{service}.service")
    return int(runtime.run(service, (flags or Flags()).settings(dict(os.environ)), module.main))
