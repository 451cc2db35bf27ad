"""The services of a lab: what is started where, with which settings and credentials.

The planner runs beside the broker in the underlay, as it would in a control plane: its plans do not pass through the relay. A host's
applier and auditor run in the host's network namespace, and in mount namespaces where /run/wireguard is a folder of the host's own:
wireguard-go keeps its sockets there under the devices' names, which are the same on many hosts.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import services
from schemas.values import IPV4, IPV6
from services.cli.lab.layout import BROKER, PREFIX, UNDERLAY, Host
from services.cli.lab.processes import Command
from services.cli.lab.state import Folder, write_private
from services.runtime import accounts
from services.runtime.accounts import HostUsers, Role, ServerConfig
from services.runtime.settings import ENVIRONMENT_PREFIX, Settings

_HTTP_PORTS: dict[Role, int] = {"applier": 9501, "auditor": 9502}
_SETTINGS = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in ("config", *Settings.__struct_fields__)}
_VIEW = 'mount --bind "$1" /run/wireguard && shift && exec "$@"'
"""For ``sh -c NAME``: a mount namespace in which /run/wireguard is the folder given first; then the command."""


class Crew:
    """Commands and credentials for one lab. Passwords are made here and live as long as the lab."""

    def __init__(self, folder: Folder, port: int) -> None:
        self._folder = folder
        self._port = port
        self._passwords = {name: secrets.token_urlsafe(18) for name in (accounts.PLANNER, accounts.PUBLISHER, accounts.READER)}
        self._system = secrets.token_urlsafe(18)
        self._hosts: dict[tuple[str, str], HostUsers] = {}

    def config(self) -> ServerConfig:
        """The broker's configuration for all that were enrolled so far. Who has no credentials is the publisher: the lab is one's own."""
        return ServerConfig(
            address="[::]",  # all interfaces of the lab's own underlay, in both families
            port=self._port,
            store_dir=str(self._folder.nats / "streams"),
            planner=self._passwords[accounts.PLANNER],
            publisher=self._passwords[accounts.PUBLISHER],
            reader=self._passwords[accounts.READER],
            system=self._system,
            hosts=tuple(self._hosts.values()),
            anonymous=accounts.PUBLISHER,
        )

    def write_credentials(self) -> None:
        """The files of the users that are no host's: the planner's, a publisher's, a reader's."""
        for name, password in self._passwords.items():
            self._write(name, password)

    def enrol(self, host: Host) -> bool:
        """Make users for a host's services; False when it has them already."""
        if (host.cluster, host.name) in self._hosts:
            return False
        users = HostUsers(host.cluster, host.name, secrets.token_urlsafe(18), secrets.token_urlsafe(18))
        self._hosts[host.cluster, host.name] = users
        for role in get_args(Role):
            self._write(accounts.host_user(role, host.cluster, host.name), getattr(users, role))
        return True

    def planner(self) -> Command:
        settings = self._settings("planner", "127.0.0.1") | {"MESHMARK_STATE_DIR": str(self._folder.host("planner"))}
        return self._command("planner", ["ip", "netns", "exec", UNDERLAY], "planner", settings)

    def host_services(self, host: Host) -> list[Command]:
        """The applier and the auditor of one host; its state folder is made."""
        name = service_name(host.namespace)
        self._folder.wireguard(name).mkdir(parents=True, exist_ok=True)
        return [
            self._command(
                f"{role}.{name}",
                host_view(self._folder, host.namespace),
                role,
                self._settings(accounts.host_user(role, host.cluster, host.name), _broker(host))
                | {
                    "MESHMARK_CLUSTER": host.cluster,
                    "MESHMARK_HOST": host.name,
                    "MESHMARK_STATE_DIR": str(self._folder.host(name)),
                    "MESHMARK_HTTP": f"127.0.0.1:{_HTTP_PORTS[role]}",
                },
            )
            for role in get_args(Role)
        ]

    def _settings(self, user: str, broker: str) -> dict[str, str]:
        return {
            "MESHMARK_NATS_URL": f"nats://{broker}:{self._port}",
            "MESHMARK_CREDENTIALS": str(self._folder.credentials(user)),
        }

    def _command(self, service: str, prefix: Sequence[str], verb: str, settings: dict[str, str]) -> Command:
        # Settings of the caller's own are for the caller's own mesh, not for this one.
        inherited = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
        return Command(
            name=service,
            argv=[*prefix, sys.executable, "-m", "services.cli.main", verb],
            environment=inherited | {"PYTHONUNBUFFERED": "1"} | settings,
            # ``python -m`` finds the package in its working folder, installed or not.
            folder=Path(services.__file__).parent.parent,
            log=self._folder.log(service),
        )

    def _write(self, user: str, password: str) -> None:
        write_private(self._folder.credentials(user), json.dumps({"user": user, "password": password}).encode())


def _broker(host: Host) -> str:
    """Where a host finds the broker: by IPv4 if it can."""
    return BROKER[IPV4] if host.address(IPV4) else f"[{BROKER[IPV6]}]"


def service_name(namespace: str) -> str:
    """``<cluster>.<host>``: how a host is called in logs and folders."""
    return namespace.removeprefix(PREFIX)


def host_view(folder: Folder, namespace: str) -> list[str]:
    """Command prefix that runs the rest in a namespace of the lab; on a host (no pod, nor the underlay) with the host's /run/wireguard."""
    sockets = folder.wireguard(service_name(namespace))
    own_sockets = ["sh", "-c", _VIEW, "lab", str(sockets)] if sockets.exists() else []
    return ["ip", "netns", "exec", namespace, *own_sockets]
