"""The numbers that plans use on a host: marks, table ids, rule priorities, ports.

Marks are those of the seed (Liqo): a gateway has a network namespace of its own, so nobody else uses these bits there. They are
always written and matched under the class mask, so that other bits of a mark survive.
"""

from __future__ import annotations

from schemas.topology import Overlay
from schemas.values import IPV4, IPV6, Address, Family, Prefix

CLASS_MASK = 0xFF00
CLASS_OUTGOING = 0xFF00
"""From a node of the own cluster, to be sent through the tunnels."""
CLASS_INCOMING = 0xFE00
"""From a tunnel, to be sent to a node of the own cluster."""

OUTGOING_TABLE = 7001
INCOMING_TABLE = 7002
NODE_TABLE = 7010
MESH_TABLE = 7011
"""On nodes, where the mesh overlay leads to each node's pods."""
ENCRYPT_TABLE = 10
"""On nodes, what is to be encrypted: by default into the WireGuard device (the seed's number)."""
EGRESS_TABLE = 7100
"""On nodes, the way to each node through which pods leave the cluster: this and the slot of that node."""
EGRESS_SLOTS = 254
"""So many nodes of a cluster may be such; slots count from 1."""
EGRESS_TABLES = range(EGRESS_TABLE + 1, EGRESS_TABLE + EGRESS_SLOTS + 1)
GATEWAY_TABLES = (OUTGOING_TABLE, INCOMING_TABLE)
NODE_TABLES = (ENCRYPT_TABLE, NODE_TABLE, MESH_TABLE, *EGRESS_TABLES)
OWN_TABLES = frozenset((*GATEWAY_TABLES, *NODE_TABLES))
"""No published route goes there."""
PUBLISHED_TABLE = 77_000_000
PUBLISHED_TABLES = 1_000_000
"""First number, and how many: the tables of published routes that are given none."""

RULE_CONTROL = 889
"""Before all others: what a gateway itself sends to its broker and management."""
RULE_LOCAL_OUTGOING = 890
"""What the gateway itself answers (ICMP errors) to an outgoing packet goes back where that came from."""
RULE_LOCAL_INCOMING = 891
RULE_OUTGOING = 900
RULE_INCOMING = 901
GATEWAY_RULES = (RULE_CONTROL, RULE_LOCAL_OUTGOING, RULE_LOCAL_INCOMING, RULE_OUTGOING, RULE_INCOMING)
RULE_NODE = 900
RULE_MESH = 902
RULE_EGRESS = 903
"""What leaves the cluster through another node, and the answers on their way back."""
RULE_ENCRYPT = 1000
"""The seed's priority, for what is marked to be encrypted."""
RULE_OWN_ENCRYPT = 1001
"""What a node itself sends to pods: a mark set in output comes after the choice of a source."""
NODE_RULES = (RULE_NODE, RULE_MESH, RULE_EGRESS, RULE_ENCRYPT, RULE_OWN_ENCRYPT)
OWN_RULES = (range(RULE_CONTROL, 910), range(RULE_ENCRYPT, RULE_OWN_ENCRYPT + 1))
"""Priorities that no published rule has."""
RULE_PUBLISHED = 2000
RULE_PUBLISHED_STEP = 150
"""Where the priorities of published rules that are given none begin, for the lowest order, and how many each order has."""

OVERLAY_PORT: dict[Overlay, int] = {"vxlan": 4789, "geneve": 6081}
OVERLAY_OVERHEAD_BYTES = {IPV4: 50, IPV6: 70}
"""By the outer family: IPv4 (20) or IPv6 (40), UDP (8), VXLAN or Geneve without options (8), inner Ethernet (14)."""
WIREGUARD_OVERHEAD_BYTES = {IPV4: 60, IPV6: 80}
"""By the outer family: IPv4 (20) or IPv6 (40), UDP (8), WireGuard data header (16) and authentication tag (16)."""

TUNNEL_NETWORK: dict[Family, Prefix] = {IPV4: Prefix("169.254.18.0/24"), IPV6: Prefix("fd6d:6573:6812::/64")}
"""Each tunnel has four addresses of each; the end that is named first in the peering has the second of them (Liqo's numbers), the other
end the third."""
TUNNEL_LENGTH = {IPV4: 30, IPV6: 126}
OVERLAY_LINK_LOCAL = {1: Address("fe80::1"), 2: Address("fe80::2")}
"""By side of an overlay link, the gateway's first. Neighbours are asked for from a link-local address, and the kernel's own one is of no
use for a second or more after the link is made."""
NEVER_ROUTED = ("::/128", "fe80::/10")
"""IPv6 sources of neighbour discovery and the like: no route leads there, and the kernel forwards nothing from them."""

RESERVED = ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/8", "fd6d:6573:6812::/48", "fe80::/10", "ff00::/8")
"""Prefixes that no cluster may use: this network, loopback, IPv4 in other forms, link-local and the tunnels' own addresses, multicast
and beyond."""
NO_HOST = ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3", "::/8", "fe80::/10", "ff00::/8")
"""Where no underlay address can be."""

MESH_VNI = 77
"""The mesh overlay's id. A link between gateway and node has a gateway's number, which is never 0, above its lowest twelve bits."""

HOST_NUMBER_MAX = 4094
HOST_NUMBER_BITS = 12

PRIORITY_RAW = -300
PRIORITY_MANGLE = -150
PRIORITY_DSTNAT = -100
PRIORITY_AFTER_DSTNAT = -90
"""Destinations are what they will be: a service's address has become a pod's, and the answer to what was masqueraded is for its pod."""
PRIORITY_AFTER_STEERING = -89
PRIORITY_FILTER = 0
PRIORITY_BEFORE_NAT = 98
"""Sources are still what they came with."""
PRIORITY_BEFORE_SRCNAT = 99
"""Just before the CNI's masquerading, which must not see flows to a remote cluster."""
PRIORITY_SRCNAT = 100
PRIORITY_LAST = 300
