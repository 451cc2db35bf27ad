"""The numbers that plans use on a host: marks, table ids, rule priorities, ports.

Marks are those of the seed (Liqo): a gateway has a network namespace of its own, so nobody else uses these bits there. They are
always written and matched under the class mask, so that other bits of a mark survive.
"""

from __future__ import annotations

CLASS_MASK = 0xFF00
CLASS_OUTGOING = 0xFF00
"""From a node of the own cluster, to be sent through the tunnels."""
CLASS_INCOMING = 0xFE00
"""From a tunnel, to be sent to a node of the own cluster."""

OUTGOING_TABLE = 7001
INCOMING_TABLE = 7002
NODE_TABLE = 7010

RULE_LOCAL_OUTGOING = 890
"""What the gateway itself answers (ICMP errors) to an outgoing packet goes back where that came from."""
RULE_LOCAL_INCOMING = 891
RULE_OUTGOING = 900
RULE_INCOMING = 901
RULE_NODE = 900

VXLAN_PORT = 4789
VXLAN_OVERHEAD_BYTES = 50
WIREGUARD_OVERHEAD_BYTES = 60
"""Outer IPv4 (20), UDP (8), WireGuard data header (16) and authentication tag (16)."""

RESERVED = ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3")
"""Prefixes that no cluster may use: this network, loopback, link-local (the tunnels' own addresses among them), multicast and beyond."""
NO_HOST = ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3")
"""Where no underlay address can be."""
TUNNEL_NETWORK = "169.254.18.0/24"
"""Each tunnel has a /30 of it; the end that is named first in the peering has the first address (Liqo's numbers)."""

HOST_NUMBER_MAX = 4094
HOST_NUMBER_BITS = 12

PRIORITY_RAW = -300
PRIORITY_MANGLE = -150
PRIORITY_DSTNAT = -100
PRIORITY_FILTER = 0
PRIORITY_BEFORE_SRCNAT = 99
"""Just before the CNI's masquerading, which must not see flows to a remote cluster."""
PRIORITY_SRCNAT = 100
PRIORITY_LAST = 300
