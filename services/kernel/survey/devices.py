"""On which UDP port WireGuard devices listen: rtnetlink does not tell that, they are asked themselves. Reads only."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from services.kernel.links import rtnetlink
from services.kernel.netlink import NETLINK_GENERIC, NetlinkSocket
from services.kernel.pyroute import Library
from services.kernel.survey.values import LinkSeen
from services.kernel.uapi import Userspace, socket_path
from services.kernel.wireguard_kernel import KernelModule


def with_ports(links: Mapping[int, LinkSeen]) -> tuple[LinkSeen, ...]:
    """The links, WireGuard devices with the port that they listen on."""
    if not any(link.port is None for link in links.values()):
        return tuple(links.values())
    library, generic = Library(), NetlinkSocket(NETLINK_GENERIC)
    try:
        module = KernelModule(generic, rtnetlink(library))
        return tuple(replace(link, port=_wireguard_port(link, module)) if link.port is None else link for link in links.values())
    finally:
        library.close()
        generic.close()


def _wireguard_port(link: LinkSeen, module: KernelModule) -> int | None:
    """The device's UDP port; 0 for a tun device with nothing behind it that we know, None where it does not answer."""
    if link.kind == "tun" and not socket_path(link.name).exists():
        return 0
    try:
        state = module.get(link.name) if link.kind == "wireguard" else Userspace(lambda _: True).get(link.name)
    except OSError:
        return None
    return state.listen_port
