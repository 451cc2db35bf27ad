"""Connection tracking: entries of both families read, and deleted by what they are.

Owns nothing: entries belong to their flows. An entry is deleted by its original direction and zone; one that went away meanwhile is not
counted. Fails with Transient when the table cannot be read; a kernel without connection tracking has no entries.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from functools import partial

from pyroute2.conntrack import AsyncConntrack
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_CTNETLINK
from pyroute2.netlink.nfnetlink.nfctsocket import IPCTNL_MSG_CT_GET, IPCTNL_MSG_CT_NEW, NFCTAttrTuple, nfct_msg

from schemas.values import FAMILIES, IPV4, IPV6, SOCKET_FAMILY, Address, Family
from services.kernel.failures import mapped, unreadable
from services.kernel.netlink import NetlinkError
from services.kernel.port import Flow
from services.kernel.pyroute import Connection, Library, Message, choosing

_NEW, _GET = (NFNL_SUBSYS_CTNETLINK << 8 | kind for kind in (IPCTNL_MSG_CT_NEW, IPCTNL_MSG_CT_GET))
_ABSENT = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)
_ICMP = {IPV4: (socket.IPPROTO_ICMP, "CTA_PROTO_ICMP"), IPV6: (socket.IPPROTO_ICMPV6, "CTA_PROTO_ICMPV6")}
_ENTRY = choosing(nfct_msg, ("CTA_TUPLE_ORIG", "CTA_TUPLE_REPLY", "CTA_ZONE"))


class Conntrack:
    """The connection-tracking table of the namespace."""

    def __init__(self, library: Library) -> None:
        self._netlink = {family: Connection(library, partial(_socket, SOCKET_FAMILY[family])) for family in FAMILIES}

    def flows(self) -> Iterator[Flow]:
        for family, netlink in self._netlink.items():
            try:
                messages = netlink.dump(partial(_of, SOCKET_FAMILY[family]), _GET)
            except NetlinkError as error:
                if error.errno in _ABSENT:
                    continue
                raise unreadable(error, "connection tracking") from error
            yield from (flow for message in messages if (flow := _decode(message, family)) is not None)

    def drop(self, flows: Iterable[Flow]) -> int:
        return sum(self._drop(flow) for flow in flows)

    def _drop(self, flow: Flow) -> bool:
        try:
            self._netlink[flow.source.family].call("entry", "del", tuple_orig=_original(flow), zone=flow.zone or None)
        except NetlinkError as error:
            if error.errno == errno.ENOENT:
                return False
            raise mapped(error, f"drop flow {flow.source} to {flow.destination}") from error
        return True


def _socket(family: int) -> AsyncConntrack:
    made = AsyncConntrack(nfgen_family=family, ext_ack=True)
    made.register_policy(_NEW, _ENTRY)
    return made


def _of(family: int) -> nfct_msg:
    message = nfct_msg()
    message["nfgen_family"] = family
    return message


def _original(flow: Flow) -> NFCTAttrTuple:
    ends = {"family": SOCKET_FAMILY[flow.source.family], "saddr": flow.source, "daddr": flow.destination, "proto": flow.protocol}
    if flow.protocol == _ICMP[flow.source.family][0]:
        # An ICMP entry's identifier stands in the source port, its type and code in the destination port.
        kind, code = flow.destination_port >> 8, flow.destination_port & 0xFF
        return NFCTAttrTuple(**ends, icmp_id=flow.source_port, icmp_type=kind, icmp_code=code)
    return NFCTAttrTuple(**ends, sport=flow.source_port, dport=flow.destination_port)


def _decode(message: Message, family: Family) -> Flow | None:
    original = message.inner("CTA_TUPLE_ORIG")
    source, destination = _addresses(original, family)
    reply_source, reply_destination = _addresses(message.inner("CTA_TUPLE_REPLY"), family)
    if not (source and destination and reply_source and reply_destination):
        return None
    proto = original.inner("CTA_TUPLE_PROTO")
    protocol = proto.number("CTA_PROTO_NUM")
    icmp, name = _ICMP[family]
    if protocol == icmp:
        ports = proto.number(f"{name}_ID"), proto.number(f"{name}_TYPE") << 8 | proto.number(f"{name}_CODE")
    else:
        ports = proto.number("CTA_PROTO_SRC_PORT"), proto.number("CTA_PROTO_DST_PORT")
    return Flow(protocol, source, destination, reply_source, reply_destination, *ports, message.number("CTA_ZONE"))


def _addresses(direction: Message, family: Family) -> tuple[Address | None, Address | None]:
    """Both ends of a direction; None where it is not of the family."""
    ends = direction.inner("CTA_TUPLE_IP")
    source, destination = ends.text(f"CTA_IP_V{family}_SRC"), ends.text(f"CTA_IP_V{family}_DST")
    return Address(source) if source else None, Address(destination) if destination else None
