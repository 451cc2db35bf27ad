"""Geneve devices in the words of rtnetlink (include/uapi/linux/if_link.h, IFLA_GENEVE_*). ``links`` makes, changes and removes them.

The kernel lets the far end change in place, within its family; VNI and port cannot. A device has no near end: outer packets have the source
that the route to the far end gives. One that takes its tunnel from each packet's metadata, or sends no Ethernet frames, is none that a plan
asks for.
"""

from __future__ import annotations

from pyroute2.netlink.rtnl.ifinfmsg.plugins.geneve import geneve

from schemas.host_objects import GeneveLink
from schemas.values import IPV6, Address, Mac
from services.kernel.pyroute import Message, choosing

KIND = "geneve"
DATA = choosing(
    geneve,
    (
        "IFLA_GENEVE_ID",
        "IFLA_GENEVE_REMOTE",
        "IFLA_GENEVE_REMOTE6",
        "IFLA_GENEVE_PORT",
        "IFLA_GENEVE_COLLECT_METADATA",
        "IFLA_GENEVE_INNER_PROTO_INHERIT",
    ),
)


def fixed(wanted: GeneveLink) -> dict[str, object]:
    """What can be told only to a device that is being made."""
    return {"geneve_port": wanted.port}


def changeable(wanted: GeneveLink) -> dict[str, object]:
    """What may be told to a device that is there."""
    family = "6" if wanted.remote.family == IPV6 else ""
    return {"kind": KIND, "geneve_id": wanted.vni, f"geneve_remote{family}": wanted.remote}


def decoded(data: Message, name: str, mac: str, mtu: int) -> GeneveLink | None:
    """A device as a plan would say it; None where none can."""
    remote = data.text("IFLA_GENEVE_REMOTE") or data.text("IFLA_GENEVE_REMOTE6")
    if not remote or data.has("IFLA_GENEVE_COLLECT_METADATA") or data.has("IFLA_GENEVE_INNER_PROTO_INHERIT"):
        return None
    return GeneveLink(name, data.number("IFLA_GENEVE_ID"), Address(remote), Mac(mac), mtu, data.number("IFLA_GENEVE_PORT"))
