"""The nats-server configuration: who may say and read what, as a pure function of values.

Four accounts, because a permission on a subject is not enough inside one account: the server writes its replies (acknowledgements,
stored messages) to whatever reply subject a client names, without asking whether that client may publish there. In one account a
host's ``reply=mesh.status.<other>`` became the other host's newest status. Across accounts such a reply ends in
the asker's own account, where no stream listens.

- ``CONTROL`` holds the streams; only planners are in it.
- ``HOSTS`` has two users per host, the applier's and the auditor's, each with exactly its own subjects.
- ``PEOPLE`` has publishers, who may also command hosts and accept what a planner holds back, and readers. They may not create consumers:
  a push consumer delivers stored bytes of the asker's choice to a subject of the asker's choice (nats-server #8274). They read by
  subscription and direct get instead.
- ``SYS`` is the server's own.

The account table is static; only users change when a host is added, so that a reload (SIGHUP) leaves live connections alone.
"""

from __future__ import annotations

import json
from typing import Literal

from msgspec import Struct

from schemas import subjects

Role = Literal["applier", "auditor"]
Tree = dict[str, object]

PLANNER, PUBLISHER, READER, SYSTEM = "planner", "publisher", "reader", "system"

_API = "$JS.API"
_NEXT = f"{_API}.CONSUMER.MSG.NEXT.PLAN"
_ACK = "$JS.ACK.PLAN"
_GET = f"{_API}.DIRECT.GET"
_KEYS = f"{subjects.TOPOLOGY}.publickey.>"
_EVERYTHING = f"{subjects.ROOT}.>"
_COMMANDS = f"{subjects.COMMAND}.>"
_TOPOLOGY = f"{subjects.TOPOLOGY}.>"
_SAID = (_TOPOLOGY, subjects.ACCEPT)
"""What publishers say to planners."""
_READS = (f"{_API}.STREAM.MSG.GET.*", f"{_API}.STREAM.INFO.*", f"{_API}.STREAM.NAMES", f"{_API}.INFO")
_REPLIES = "_R_.>"
"""Where the server takes replies to requests that came from another account; each is a random token, good for one request."""

_HOST_SINGLE = (f"{_ACK}.>", f"{subjects.STATUS}.>", f"{subjects.DRIFT}.>", f"{subjects.DEADLETTER}.>", _KEYS)
_HOST_MANY = (f"{_NEXT}.*", f"{_GET}.PLAN.>", f"{_GET}.SNAPSHOT.>", f"{_GET}.STATUS.>", f"{_GET}.DRIFT.>")
# The server does not pass on by stream what came in by service, so that people hear hosts from their account, not by way of CONTROL.
_HOSTS_SAY = (f"{subjects.STATUS}.>", f"{subjects.DRIFT}.>", f"{subjects.DEADLETTER}.>", f"{subjects.FLOW}.>", _KEYS)
_CONTROL_SAYS = tuple(
    f"{prefix}.>" for prefix in (subjects.STATE, subjects.ALLOCATION, subjects.PLAN, subjects.SNAPSHOT, subjects.REFUSED, subjects.FROZEN)
)


class HostUsers(Struct, frozen=True):
    """The two users of one host, by their passwords. The user names are ``host_user``'s."""

    cluster: str
    host: str
    applier: str
    auditor: str


class ServerConfig(Struct, frozen=True, kw_only=True):
    """All that the server's configuration depends on.

    `port` -1 takes any free one, and the server writes which into `ports_dir`. Passwords are plain text or bcrypt hashes.
    `anonymous` names the user that a client without credentials becomes, None for nobody.
    """

    address: str = "127.0.0.1"
    port: int = 4222
    store_dir: str
    ports_dir: str = ""
    planner: str
    publisher: str
    reader: str
    system: str
    hosts: tuple[HostUsers, ...] = ()
    anonymous: str | None = None


def host_user(role: Role, cluster: str, host: str) -> str:
    """The user name of a host's service, which is also the name of its durable consumer on PLAN."""
    return subjects.consumer(role, cluster, host)


def inbox_prefix(user: str) -> str:
    """Where replies to `user` arrive; no other host may subscribe there. An anonymous user has the NATS default."""
    return f"_INBOX.{user}" if user else "_INBOX"


def render(config: ServerConfig) -> str:
    """The text of the configuration file. It is JSON, which nats-server reads, so that any password is quoted rightly."""
    tree: Tree = {
        "listen": f"{config.address}:{config.port}",
        "jetstream": {"store_dir": config.store_dir},
        "system_account": "SYS",
        "accounts": {
            "CONTROL": _control(config),
            "HOSTS": _hosts(config),
            "PEOPLE": _people(config),
            "SYS": {"users": [{"user": SYSTEM, "password": config.system}]},
        },
    }
    if config.ports_dir:
        tree["ports_file_dir"] = config.ports_dir
    if config.anonymous is not None:
        tree["no_auth_user"] = config.anonymous
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def _control(config: ServerConfig) -> Tree:
    return {
        "jetstream": "enabled",
        "users": [{"user": PLANNER, "password": config.planner}],
        "exports": [
            *(_export(subject, "HOSTS") for subject in _HOST_SINGLE),
            *(_export(subject, "HOSTS", many=True) for subject in _HOST_MANY),
            *(_export(subject, "PEOPLE") for subject in (*_READS, *_SAID)),
            _export(f"{_GET}.>", "PEOPLE", many=True),
            *({"stream": subject, "accounts": ["PEOPLE"]} for subject in _CONTROL_SAYS),
        ],
        "imports": [_import("HOSTS", _COMMANDS)],
    }


def _hosts(config: ServerConfig) -> Tree:
    return {
        "users": [_host(role, users) for users in config.hosts for role in ("applier", "auditor")],
        "exports": [
            {"service": _COMMANDS, "accounts": ["CONTROL", "PEOPLE"]},
            *({"stream": subject, "accounts": ["PEOPLE"]} for subject in _HOSTS_SAY),
        ],
        "imports": [_import("CONTROL", subject) for subject in (*_HOST_SINGLE, *_HOST_MANY)],
    }


def _people(config: ServerConfig) -> Tree:
    reads = (*_READS, f"{_GET}.>")
    listen = {"allow": [_EVERYTHING, "_INBOX.>"]}
    publisher = {"publish": {"allow": [*_SAID, _COMMANDS, *reads], "deny": [_KEYS]}, "subscribe": listen}
    reader = {"publish": {"allow": list(reads)}, "subscribe": listen}
    return {
        "users": [
            {"user": PUBLISHER, "password": config.publisher, "permissions": publisher},
            {"user": READER, "password": config.reader, "permissions": reader},
        ],
        "imports": [
            *(_import("CONTROL", subject) for subject in (*reads, *_SAID)),
            _import("HOSTS", _COMMANDS),
            *({"stream": {"account": "CONTROL", "subject": subject}} for subject in _CONTROL_SAYS),
            *({"stream": {"account": "HOSTS", "subject": subject}} for subject in _HOSTS_SAY),
        ],
    }


def _host(role: Role, users: HostUsers) -> Tree:
    cluster, host = users.cluster, users.host
    user = host_user(role, cluster, host)
    status, plan = subjects.status(cluster, host), subjects.plan(cluster, host)
    publish = [
        f"{_NEXT}.{user}",
        f"{_ACK}.{user}.>",
        f"{_GET}.PLAN.{plan}",
        f"{_GET}.SNAPSHOT.{_below(subjects.snapshot(cluster, host, 'head'))}",
        f"{_GET}.STATUS.{status}",
        subjects.deadletter(cluster, host, role),
    ]
    listen = [f"{inbox_prefix(user)}.>"]
    if role == "applier":
        # Commands come from other accounts. `allow_responses` would let a host answer to any subject that is named as reply, another
        # host's status among them.
        publish += [status, subjects.topology("publickey", cluster, host), _REPLIES]
        listen.append(_below(subjects.command(cluster, host, "any")))
    else:
        drift = _below(subjects.drift(cluster, host, "any"))
        publish += [drift, f"{_GET}.DRIFT.{drift}", subjects.flow(cluster, host)]
    password = users.applier if role == "applier" else users.auditor
    return {"user": user, "password": password, "permissions": {"publish": {"allow": publish}, "subscribe": {"allow": listen}}}


def _below(subject: str) -> str:
    """The pattern of all subjects that differ from `subject` in the last token or go on after it."""
    return f"{subject.rpartition('.')[0]}.>"


def _export(subject: str, account: str, *, many: bool = False) -> Tree:
    # A pull or a batch read is answered by many messages, heartbeats and a status; a plain export stops after the first.
    return {"service": subject, "accounts": [account], **({"response_type": "stream"} if many else {})}


def _import(account: str, subject: str) -> Tree:
    return {"service": {"account": account, "subject": subject}}
