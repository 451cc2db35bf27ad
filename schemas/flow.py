"""Traced packets as messages: one for each point of a host that a packet of a traced flow was seen at.

Names and spellings are Hubble's (``flow.proto`` and ``observer.proto`` of Cilium), as its command writes them with ``--output jsonpb``, so
that what reads those reads these. `IP.encrypted` is as strict as there: it is the outer packet that is encrypted. What Hubble has no
field for comes after its own: `nft`, `ct`, `mark`, `wg`, `corr`, `encryption`, `because`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from msgspec import Struct

PointName = Literal[
    "UNKNOWN_POINT",
    "TO_HOST",
    "TO_STACK",
    "TO_OVERLAY",
    "FROM_ENDPOINT",
    "FROM_HOST",
    "FROM_OVERLAY",
    "FROM_NETWORK",
    "TO_NETWORK",
    "FROM_CRYPTO",
    "TO_CRYPTO",
    "TO_ENDPOINT",
]
POINTS: dict[PointName, int] = {
    "TO_HOST": 2,
    "TO_STACK": 3,
    "TO_OVERLAY": 4,
    "FROM_ENDPOINT": 5,
    "FROM_HOST": 7,
    "FROM_OVERLAY": 9,
    "FROM_NETWORK": 10,
    "TO_NETWORK": 11,
    "FROM_CRYPTO": 12,
    "TO_CRYPTO": 13,
    "TO_ENDPOINT": 101,
    "UNKNOWN_POINT": 0,
}
"""Hubble's numbers."""
DROP_EVENT, TRACE_EVENT = 1, 4
DropReason = Literal["DROP_REASON_UNKNOWN", "POLICY_DENIED", "UNENCRYPTED_TRAFFIC"]
DROP_REASONS: dict[DropReason, int] = {"DROP_REASON_UNKNOWN": 0, "POLICY_DENIED": 133, "UNENCRYPTED_TRAFFIC": 195}
"""Cilium's numbers of the reasons that there are here: of what drops packets in clear, and of any other rule or policy."""

Verdict = Literal["FORWARDED", "DROPPED"]
Direction = Literal["INGRESS", "EGRESS", "TRAFFIC_DIRECTION_UNKNOWN"]
Reason = Literal["TRACE_REASON_UNKNOWN", "NEW", "ESTABLISHED", "REPLY", "RELATED"]
Encryption = Literal["encrypted", "plaintext", "partial", "unknown"]
Confidence = Literal["exact", "high", "inferred"]

_SAID = {"frozen": True, "omit_defaults": True}


class IP(Struct, **_SAID, rename={"ip_version": "ipVersion"}):
    """Addresses before translation; `source_xlated` and `destination_xlated` are what they had become where the packet left."""

    source: str
    destination: str
    ip_version: Literal["IPv4", "IPv6"]
    source_xlated: str = ""
    destination_xlated: str = ""
    encrypted: bool = False


class Ports(Struct, **_SAID):
    """Of TCP, UDP or SCTP; `flags` are TCP's that are set."""

    source_port: int = 0
    destination_port: int = 0
    flags: dict[str, bool] = {}


class Icmp(Struct, **_SAID):
    """ICMP's type and code. They are written also where they are 0."""

    type: int | None = None
    code: int | None = None


class Layer4(Struct, **_SAID, rename={"tcp": "TCP", "udp": "UDP", "sctp": "SCTP", "icmp4": "ICMPv4", "icmp6": "ICMPv6"}):
    """One of them, or none for another protocol."""

    tcp: Ports | None = None
    udp: Ports | None = None
    sctp: Ports | None = None
    icmp4: Icmp | None = None
    icmp6: Icmp | None = None


class Tunnel(Struct, **_SAID, rename={"ip": "IP"}):
    """The outer headers of an overlay packet. `length` is the outer packet's in bytes, which Hubble has no field for.

    `IP`, `l4`, `Summary` and `length` of such a flow are those of the packet inside, as in Hubble. Where the kernel did not show that, the
    flow has no `IP` and `l4`, and its `length` is the outer packet's, too.
    """

    protocol: Literal["VXLAN", "GENEVE"]
    ip: IP
    l4: Layer4
    vni: int = 0
    length: int = 0


class FlowEnd(Struct, **_SAID):
    """Who an end of a flow is, as far as the topology says: ``cluster/pod``, ``cluster/node``."""

    cluster_name: str = ""
    pod_name: str = ""
    node_name: str = ""


class EventType(Struct, **_SAID):
    """Hubble's numbers of an event's kind and of its point."""

    type: int
    sub_type: int = 0


class Interface(Struct, **_SAID):
    """The link that the packet came by, or goes by."""

    index: int
    name: str = ""


class NftPlace(Struct, **_SAID):
    """Where in nftables the packet was, and what was said of it there. `handle` is 0 at the end of a chain."""

    trace_id: int
    family: str = ""
    table: str = ""
    chain: str = ""
    handle: int = 0
    comment: str = ""
    verdict: str = ""


class Connection(Struct, **_SAID):
    """The tracked connection. `status` has the kernel's bits: 16 for a translated source, 32 for a translated destination.

    A `direction` that is left out is ``original``: a packet of no known connection has none of this.
    """

    id: int
    state: str = ""
    direction: Literal["original", "reply"] = "original"
    status: int = 0


class WireguardSeen(Struct, **_SAID):
    """Of an outer packet what it says in clear, and the peer that its addresses name; of an inner one the peer whose AllowedIPs hold it."""

    device: str = ""
    peer: str = ""
    msg_type: str = ""
    receiver_index: int | None = None
    counter: int | None = None


class Correlation(Struct, **_SAID):
    """What holds events of one packet together: those with one `group` are of one packet, with this confidence, found by this method."""

    group: str
    method: str
    confidence: Confidence


class FlowEvent(
    Struct,
    frozen=True,
    omit_defaults=True,
    kw_only=True,
    tag_field="Type",
    tag="L3_L4",
    rename={"ip": "IP", "summary": "Summary"},
):
    """One packet at one point. `length` is the packet's in bytes, from its network header on; with a `tunnel`, see there.

    Hubble's `Type` is always written, since who reads flows of several kinds tells them apart by it; there is one kind here. What is left
    out is protobuf's default (empty, 0, false, unknown), as Hubble's command leaves it out.
    """

    time: str
    uuid: str
    verdict: Verdict
    drop_reason_desc: DropReason = "DROP_REASON_UNKNOWN"
    ip: IP | None = None
    l4: Layer4 | None = None
    tunnel: Tunnel | None = None
    source: FlowEnd | None = None
    destination: FlowEnd | None = None
    node_name: str
    event_type: EventType
    traffic_direction: Direction = "TRAFFIC_DIRECTION_UNKNOWN"
    trace_observation_point: PointName = "UNKNOWN_POINT"
    trace_reason: Reason = "TRACE_REASON_UNKNOWN"
    is_reply: bool | None = None
    interface: Interface | None = None
    summary: str = ""
    length: int = 0
    nft: NftPlace | None = None
    ct: Connection | None = None
    mark: int = 0
    decrypted: bool = False
    wg: WireguardSeen | None = None
    corr: Correlation | None = None
    encryption: Encryption | None = None
    because: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """ValueError for a time that is none: events are put in order by it."""
        datetime.fromisoformat(self.time)

    @property
    def outer(self) -> IP | None:
        """The addresses by which the packet is on its way: its own, or those of what it is wrapped in."""
        return self.tunnel.ip if self.tunnel else self.ip

    @property
    def outer_length(self) -> int:
        """The length of what is on its way."""
        return (self.tunnel.length if self.tunnel else 0) or self.length


class LostEvents(Struct, **_SAID):
    """That events were lost: how many, where that is known, and by whom. The kernel does not say how many.

    Its buffer is called as Hubble calls the one between kernel and agent; here it is a netlink socket's.
    """

    source: Literal["PERF_EVENT_RING_BUFFER", "OBSERVER_EVENTS_QUEUE"]
    num_events_lost: int | None = None


class FlowMessage(Struct, **_SAID):
    """What is said on ``mesh.flow.<cluster>.<host>``: a flow, or that some were lost."""

    node_name: str
    time: str
    flow: FlowEvent | None = None
    lost_events: LostEvents | None = None
