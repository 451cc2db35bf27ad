"""What the kernel can do, asked by having it done in a scratch network namespace that ends with the thread that made it.

Nothing in the host's own namespace is touched. Without the right to make a namespace the answer is ``unknown``. The caller sees to it
that asking loads no module (``modules``).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from services.kernel.namespace import enter_new_network
from services.kernel.netlink import (
    CREATE,
    EXCL,
    NETLINK_NETFILTER,
    NETLINK_ROUTE,
    U32,
    NetlinkError,
    NetlinkSocket,
    attribute,
    text_attribute,
)
from services.kernel.nft.engine import LibNftables
from services.kernel.survey.values import Ability
from services.runtime.errors import MeshmarkError

_TIMEOUT_S = 30.0
_NEWLINK, _NEWNEXTHOP = 16, 104
_LINK = struct.Struct("=BxHiII")
_NEXTHOP = struct.Struct("=BBBBI")
_NEW = CREATE | EXCL
_UP = 0x1
_IFNAME, _LINKINFO, _KIND, _DATA = 3, 18, 1, 2
_ID, _GENEVE_REMOTE, _VXLAN_PORT = 1, 2, 15
_NHA_ID, _NHA_GROUP, _NHA_GROUP_TYPE, _NHA_BLACKHOLE, _NHA_RES_GROUP = 1, 2, 3, 4, 12
_NESTED, _RESILIENT, _BUCKETS = 0x8000, 1, 1
_GET_CONNTRACK_STATS = 1 << 8 | 5  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_GET_STATS
_ABSENT = (errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
_TABLE = "add table inet probe; add chain inet probe c { type filter hook prerouting priority 0; }; "
_PLAN_FORMS = (
    _TABLE + "add map inet probe p { type ipv4_addr : interval ipv4_addr; flags interval; }; "
    "add element inet probe p { 10.61.0.0/16 : 10.200.0.0/16 }; "
    "add map inet probe v { type ifname : verdict; flags interval; }; "
    "add chain inet probe n { type nat hook postrouting priority 99; }; "
    "add chain inet probe f { type filter hook forward priority -150; }; "
    "add rule inet probe c iifname vmap @v; "
    "add rule inet probe c ct state != related fib saddr . mark . iif oif missing counter drop; "
    "add rule inet probe c meta mark set meta mark & 0xffff00ff | 0xff00; "
    "add rule inet probe f tcp option maxseg size set rt mtu; "
    "add rule inet probe c notrack; "
    "add rule inet probe n snat ip prefix to ip saddr map @p"
)
"""The kinds of statements that plans are made of."""


def in_scratch(work: Callable[[], Ability]) -> Ability:
    """Do the work in a network namespace of its own; ``unknown`` where none may be made."""
    answers: list[Ability] = []

    def run() -> None:
        try:
            enter_new_network()
        except OSError as error:
            answers.append(Ability("unknown", f"no right to make a scratch network namespace: {error.strerror}"))
            return
        answers.append(work())

    thread = threading.Thread(target=run, name="probe", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return answers[0] if answers else Ability("unknown", f"no answer from the kernel within {_TIMEOUT_S:g} s")


def link(kind: str) -> Ability:
    """Whether the kernel makes links of this kind: ``vxlan``, ``geneve`` or ``wireguard``."""
    options = {
        "vxlan": attribute(_ID, U32.pack(1)) + attribute(_VXLAN_PORT, struct.pack(">H", 4789)),
        "geneve": attribute(_ID, U32.pack(1)) + attribute(_GENEVE_REMOTE, socket.inet_aton("192.0.2.1")),
    }
    info = text_attribute(_KIND, kind) + (attribute(_DATA, options[kind]) if kind in options else b"")
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text_attribute(_IFNAME, "probe0") + attribute(_LINKINFO, info)
    return in_scratch(lambda: _asked(NETLINK_ROUTE, [(_NEWLINK, _NEW, body)], f"made a {kind} link in a scratch namespace"))


def resilient_groups() -> Ability:
    """Whether next-hop groups can be resilient: flows stay on their next hop when another one leaves."""
    # The hop is a blackhole, which stands on the loopback link.
    loopback = _LINK.pack(socket.AF_UNSPEC, 0, 1, _UP, _UP)
    hop = _NEXTHOP.pack(socket.AF_INET, 0, 0, 0, 0) + attribute(_NHA_ID, U32.pack(1)) + attribute(_NHA_BLACKHOLE, b"")
    members = struct.pack("=IBBH", 1, 0, 0, 0)
    group = (
        _NEXTHOP.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        + attribute(_NHA_ID, U32.pack(2))
        + attribute(_NHA_GROUP, members)
        + attribute(_NHA_GROUP_TYPE, struct.pack("=H", _RESILIENT))
        + attribute(_NESTED | _NHA_RES_GROUP, attribute(_BUCKETS, struct.pack("=H", 8)))
    )
    requests = [(_NEWLINK, 0, loopback), (_NEWNEXTHOP, _NEW, hop), (_NEWNEXTHOP, _NEW, group)]
    return in_scratch(lambda: _asked(NETLINK_ROUTE, requests, "made one in a scratch namespace"))


def conntrack() -> Ability:
    """Whether tracked connections can be listed."""
    body = bytes((socket.AF_UNSPEC, 0, 0, 0))
    return in_scratch(lambda: _asked(NETLINK_NETFILTER, [(_GET_CONNTRACK_STATS, 0, body)], "answers to ctnetlink"))


def nft_plan() -> Ability:
    """Whether the kernel and libnftables take the kinds of statements that plans are made of."""
    return in_scratch(lambda: _loaded(_PLAN_FORMS, "all statements that plans are made of"))


def nft_statement(statement: str) -> Ability:
    """Whether one statement of nft loads."""
    return in_scratch(lambda: _loaded(f"{_TABLE}add rule inet probe c {statement}", f"the statement '{statement}'"))


def _asked(protocol: int, requests: list[tuple[int, int, bytes]], well: str) -> Ability:
    try:
        with _opened(protocol) as netlink:
            for kind, flags, body in requests:
                netlink.request(kind, body, flags)
    except NetlinkError as error:
        if error.errno in _ABSENT:
            return Ability("no", f"the kernel says: {error.strerror}")
        return Ability("unknown", f"the kernel says: {error.strerror}")
    except OSError as error:
        return Ability("no" if error.errno in _ABSENT else "unknown", f"no netlink socket: {error.strerror}")
    return Ability("yes", well)


def _loaded(text: str, what: str) -> Ability:
    try:
        engine = LibNftables()
        try:
            engine.run(text)
        finally:
            engine.close()
    except MeshmarkError as error:
        return Ability("no", str(error))
    except OSError as error:
        return Ability("no", f"no libnftables: {error}")
    return Ability("yes", f"libnftables {engine.version} and the kernel take {what}")


@contextlib.contextmanager
def _opened(protocol: int) -> Iterator[NetlinkSocket]:
    opened = NetlinkSocket(protocol)
    try:
        yield opened
    finally:
        opened.close()
