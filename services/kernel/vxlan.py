"""VXLAN devices in the words of rtnetlink (include/uapi/linux/if_link.h, IFLA_VXLAN_*). ``links`` makes, changes and removes them.

The kernel lets both ends change in place, within their family; VNI and port cannot. A device that learns, or has no near end, is none that
a plan asks for; one without far end leads where ``neighbours`` says.
"""

from __future__ import annotations

from pyroute2.netlink.rtnl.ifinfmsg.plugins.vxlan import vxlan

from schemas.host_objects import VxlanLink
from schemas.values import IPV4, IPV6, Address, Mac
from services.kernel.pyroute import Message, choosing

KIND = "vxlan"
_ENDS = {IPV4: ("IFLA_VXLAN_LOCAL", "IFLA_VXLAN_GROUP"), IPV6: ("IFLA_VXLAN_LOCAL6", "IFLA_VXLAN_GROUP6")}
DATA = choosing(vxlan, ("IFLA_VXLAN_ID", *_ENDS[IPV4], *_ENDS[IPV6], "IFLA_VXLAN_LEARNING", "IFLA_VXLAN_PORT"))


def fixed(wanted: VxlanLink) -> dict[str, object]:
    """What can be told only to a device that is being made; the kernel refuses to be told the port again."""
    return {"vxlan_port": wanted.port}


def changeable(wanted: VxlanLink) -> dict[str, object]:
    """What may be told to a device that is there."""
    family = "6" if wanted.local.family == IPV6 else ""
    return {
        "kind": KIND,
        "vxlan_id": wanted.vni,
        f"vxlan_local{family}": wanted.local,
        **({f"vxlan_group{family}": wanted.remote} if wanted.remote else {}),
        "vxlan_learning": 0,
    }


def decoded(data: Message, name: str, mac: str, mtu: int) -> VxlanLink | None:
    """A device as a plan would say it; None where none can."""
    ends = [(data.text(local), data.text(remote)) for local, remote in _ENDS.values()]
    local, remote = next((pair for pair in ends if pair[0]), ("", ""))
    if not local or data.number("IFLA_VXLAN_LEARNING"):
        return None
    vni, port = data.number("IFLA_VXLAN_ID"), data.number("IFLA_VXLAN_PORT")
    return VxlanLink(name, vni, Address(local), Address(remote) if remote else None, Mac(mac), mtu, port)
