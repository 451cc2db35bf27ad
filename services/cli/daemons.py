"""``meshmark planner``, ``applier``, ``auditor`` and ``server``: the processes."""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from cyclopts import App, Parameter

from schemas.values import Name
from services.cli.hosts import parse_host
from services.cli.lab.state import write_private
from services.cli.output import console, note
from services.runtime.accounts import PLANNER, PUBLISHER, READER, HostUsers, Role, ServerConfig, host_user
from services.runtime.errors import Permanent
from services.runtime.settings import Settings, load, parse_address, read_credentials

SERVICES = ("planner", "applier", "auditor", "server")
"""The commands that are here, all of which stay."""


@Parameter(name="*")
@dataclass(frozen=True)
class Flags:
    """Settings of any service. Each is also an environment variable (MESHMARK_NATS_URL) and a key of the TOML file."""

    nats_url: Annotated[str | None, Parameter(help="NATS server [default: nats://127.0.0.1:4222]")] = None
    credentials: Annotated[str | None, Parameter(help='JSON file with {"user": …, "password": …}')] = None
    http: Annotated[str | None, Parameter(help="Where /healthz, /readyz and /metrics are; empty for nowhere [default: 127.0.0.1:9464]")] = (
        None
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"] | None, Parameter(help="What is logged [default: info]")] = None
    log_format: Annotated[Literal["json", "console"] | None, Parameter(help="console is for people [default: json]")] = None
    config: Annotated[Path | None, Parameter(help="TOML file with settings")] = None

    def settings(self, environment: dict[str, str]) -> Settings:
        values = {name: value for name, value in vars(self).items() if name != "config"}
        config = self.config or (Path(environment["MESHMARK_CONFIG"]) if "MESHMARK_CONFIG" in environment else None)
        return load(config, environment, values)


@dataclass(frozen=True)
class HostFlags(Flags):
    """Settings of a service on a host. It must know who it is; from which source is all the same."""

    cluster: Annotated[str | None, Parameter(help="Cluster of this host; needed")] = None
    host: Annotated[str | None, Parameter(help="Name of this host's Node or Gateway object; needed")] = None


@dataclass(frozen=True)
class ApplierFlags(HostFlags):
    """Settings of an applier."""

    state_dir: Annotated[
        str | None, Parameter(help="Folder for the private key and what is given back later [default: /var/lib/meshmark]")
    ] = None


@dataclass(frozen=True)
class AuditorFlags(HostFlags):
    """Settings of an auditor."""

    resync_s: Annotated[float | None, Parameter(help="Period of the full pass, in seconds [default: 300]")] = None
    quiet_s: Annotated[
        float | None, Parameter(help="Period of the look at WireGuard and sysctls, which have no events, in seconds [default: 10]")
    ] = None


def register(app: App) -> None:
    """Add the commands to the application."""
    app.command(planner)
    app.command(applier)
    app.command(auditor)
    app.command(server)


def planner(*, flags: Flags | None = None) -> int:
    r"""Run the planner: topology events in, plans for all hosts out. One at a time.

    ```sh
    meshmark planner --nats-url nats://192.0.2.10:4222 \
        --credentials planner.json
    ```
    """
    return _run("planner", flags)


def applier(*, flags: ApplierFlags | None = None) -> int:
    r"""Run the applier of this host: keeps the network namespace it is started in as the plan says. Needs CAP_NET_ADMIN.

    ```sh
    meshmark applier --cluster rome --host node-1 \
        --nats-url nats://192.0.2.10:4222 --credentials applier.json
    ```
    """
    return _run("applier", flags)


def auditor(*, flags: AuditorFlags | None = None) -> int:
    r"""Run the auditor of this host: compares the kernel with the plan and publishes drift. Needs CAP_NET_ADMIN to read.

    ```sh
    meshmark auditor --cluster rome --host node-1 \
        --nats-url nats://192.0.2.10:4222 --credentials auditor.json \
        --http 127.0.0.1:9465
    ```
    """
    return _run("auditor", flags)


def server(
    *,
    directory: Annotated[Path, Parameter(name=["--dir"], help="Folder for the store, the configuration and the credentials")],
    listen: Annotated[str, Parameter(help="Address and port to listen on")] = "127.0.0.1:4222",
    host: Annotated[list[str], Parameter(help="A host whose services may connect, as rome/gw; give it once per host", negative=())] = [],  # noqa: B006
    anonymous: Annotated[bool, Parameter(help="Treat clients without credentials as publishers", negative=())] = False,
) -> int:
    r"""Run the embedded nats-server with the accounts that meshmark needs, and write credentials for every user.

    Credentials are kept over restarts in DIR/creds: planner.json, publisher.json, reader.json, and for each host
    applier=CLUSTER=HOST.json and auditor=CLUSTER=HOST.json, where a dot in a name is %2E. To add a host, stop the server and start it again
    with one more --host.

    ```sh
    meshmark server --dir broker --listen 192.0.2.10:4222 \
        --host rome/gateway --host rome/node-1
    ```
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
    try:
        address, port = parse_address(listen)
    except ValueError as error:
        msg = f"--listen {listen!r} is wrong: {error}"
        raise Permanent(msg) from None
    names = [_host_name(text) for text in hosts]
    creds = directory / "creds"
    try:
        creds.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / "nats").mkdir(exist_ok=True)
        return ServerConfig(
            address=f"[{address}]" if ":" in address else address,
            port=port,
            store_dir=str(directory / "nats" / "store"),
            planner=_password(creds, PLANNER),
            publisher=_password(creds, PUBLISHER),
            reader=_password(creds, READER),
            system=secrets.token_urlsafe(24),
            hosts=tuple(
                HostUsers(cluster, host, **{role: _password(creds, host_user(role, cluster, host)) for role in get_args(Role)})
                for cluster, host in names
            ),
            anonymous=PUBLISHER if anonymous else None,
        )
    except OSError as error:
        msg = f"--dir {directory}: {error.filename or directory}: {error.strerror}"
        raise Permanent(msg) from error


def _host_name(text: str) -> tuple[str, str]:
    host = parse_host(text)
    try:
        return Name.parse(host.cluster), Name.parse(host.name)
    except ValueError as error:
        msg = f"--host {text}: {error}"
        raise Permanent(msg) from None


def _password(folder: Path, user: str) -> str:
    """The password in the user's credentials file, which is made when it is not there. No two users have one file."""
    file = folder / f"{user}.json"
    if not file.exists():
        write_private(file, msgspec.json.encode({"user": user, "password": secrets.token_urlsafe(24)}))
    found = read_credentials(file)
    if found.user != user or not found.password:
        msg = f"{file} does not hold a password of {user}; move it away to have a new one made"
        raise Permanent(msg)
    return found.password


def _run(service: str, flags: Flags | None) -> int:
    """Import and run one service: a planner needs no kernel, an applier no compiler."""
    settings = (flags or Flags()).settings(dict(os.environ))
    if service != "planner":
        settings.require_host()
    runtime = importlib.import_module("services.runtime.service")
    module = importlib.import_module(f"services.{service}.service")
    return int(runtime.run(service, settings, module.main))
