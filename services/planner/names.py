"""Names that the kernel and nftables take, made from names that people give.

The kernel takes 15 bytes for a link. A name that fits is used as it is, so that a person recognises it; any other is replaced by a hash of
the whole name, which is stable over restarts and order of arrival. Two names of one cluster that would meet are refused at admission.
"""

from __future__ import annotations

import base64
import hashlib
import re

from schemas.plan import MESH_LINK_BESIDE, TUNNEL_LINK_BESIDE
from schemas.values import Family

LINK_NAME_BYTES = 15
OVERLAY_LINK_PREFIX = "mo."
TUNNEL_LINK_PREFIX = "mt."
MESH_LINK_PREFIX = "mm."
ENCRYPTION_LINK_PREFIX = "me."
OWN_LINK_PREFIXES = (OVERLAY_LINK_PREFIX, TUNNEL_LINK_PREFIX, MESH_LINK_PREFIX, ENCRYPTION_LINK_PREFIX)
ENCRYPTION_LINK = f"{ENCRYPTION_LINK_PREFIX}0"
"""A node's WireGuard device."""
ENCRYPTION_LINK_BESIDE = MESH_LINK_BESIDE
"""The one beside it while a node of the cluster changes its key."""
TUNNEL_BESIDE = TUNNEL_LINK_BESIDE
"""A gateway's WireGuard device beside those of its tunnels, while one end of its peering changes its key."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_HASH_CHARACTERS = 10
_FIREWALL = "fw"
_MESH = "mesh"
_OWN_TABLES = ("marker", "scratch", _FIREWALL, _MESH)
_TABLE_BYTES = 48


def fit(prefix: str, name: str, limit: int = LINK_NAME_BYTES) -> str:
    """`prefix` + `name` where that fits into `limit` bytes, else `prefix` + 10 characters of a hash of the name."""
    if len(prefix + name) <= limit and _PLAIN.fullmatch(name):
        return prefix + name
    raw = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return prefix + base64.b32encode(raw).decode().lower()[:_HASH_CHARACTERS]


def overlay_link(far_host: str) -> str:
    """Name of the overlay link to a host of the same cluster."""
    return fit(OVERLAY_LINK_PREFIX, far_host)


def tunnel_link(index: int) -> str:
    """Name of the gateway's tunnel number `index`, from 0."""
    return f"{TUNNEL_LINK_PREFIX}{index}"


def mesh_link(family: Family) -> str:
    """Name of a node's mesh overlay device whose outer packets are of this family, where one device leads to all nodes."""
    return f"{MESH_LINK_PREFIX}{family}"


def mesh_link_to(far_node: str) -> str:
    """Name of the mesh overlay link to one node, where each has a link of its own."""
    return fit(MESH_LINK_PREFIX, far_node)


def mesh_table(cluster: str) -> str:
    """Name of the nftables table of a cluster's mesh."""
    return fit("meshmark.", f"{_MESH}.{cluster}", limit=_TABLE_BYTES)


def table(cluster: str, peering: str) -> str:
    """Name of the nftables table of a peering; `cluster` is the one whose subject space holds the peering."""
    # A dot in the cluster's name would make two pairs one; and a cluster may be called as a table that is not a peering's.
    plain = "." not in cluster and cluster not in _OWN_TABLES
    return fit("meshmark.", f"{cluster}.{peering}" if plain else f"{cluster}/{peering}", limit=_TABLE_BYTES)


def firewall_table(name: str) -> str:
    """Name of the nftables table of a published firewall; a host is of one cluster, so the cluster's name is not needed."""
    return fit(f"meshmark.{_FIREWALL}.", name, limit=_TABLE_BYTES)
