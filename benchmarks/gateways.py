"""Gateways to send packets through: network namespaces with the links of a plan, where only what leads packets differs.

Tunnels are bare tun devices, named and addressed as the plan names and addresses them: what is written to one is a packet that came out of
the tunnel, and the kernel forwards it, to the last device, within the write. WireGuard would cost many times what is to be measured.
Nodes are behind the plan's own VXLAN links. What goes to them ends at the uplink, an ifb device, which counts a packet and drops it; what
comes from them is written to a further tun device, inside VXLAN, and ends at a tunnel: it has no queue, and counts and drops it, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct
from msgspec.structs import replace

from benchmarks import seed_rules
from benchmarks.seed_rules import Target
from schemas.host_objects import LinkAddress, VxlanLink, WireguardLink, WireguardPeer
from schemas.plan import HostPlan
from services.applier.core import Applier
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX
from services.kernel.linux import LinuxKernel
from services.runtime.errors import Permanent

_TUNSETIFF = 0x400454CA
_IFREQ = struct.Struct("16sH22x")
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_ETH_P_ALL = 0x0003
_PACKET_BYTES = 2048
UPLINK, _UNDERLAY = "uplink", "underlay"
NEIGHBOUR_MAC = "02:00:00:00:00:01"
_NO_IPV6 = (("ipv6/conf/all/disable_ipv6", "1"), ("ipv6/conf/default/disable_ipv6", "1"))
_FORWARDING = (("ipv4/ip_forward", "1"), ("ipv4/conf/all/rp_filter", "0"), ("ipv4/conf/default/rp_filter", "0"))


class Gateway(Struct, frozen=True):
    """A namespace that forwards. `inlets` are file descriptors: of the tunnels in the order of their numbers, then of the underlay."""

    namespace: str
    inlets: tuple[int, ...]

    def ended(self, links: Sequence[str]) -> int:
        """How many packets have ended at these links since they were made."""
        command = ["ip", "-n", self.namespace, "-j", "-s", "link", "show"]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        counters = [item["stats64"] for item in found if item["ifname"] in links]
        return sum(item["rx"]["dropped"] + item["tx"]["dropped"] for item in counters)

    def first_through(self, link: str, send: Callable[[], None]) -> bytes:
        """The first packet that `link` is given while `send` runs, from its IP header on; empty for none."""
        listener = namespaces.inside(self.namespace, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM))
        with listener:
            listener.bind((link, _ETH_P_ALL))
            listener.settimeout(0)
            send()
            try:
                return listener.recv(_PACKET_BYTES)
            except BlockingIOError:
                return b""


def without_tunnels(plan: HostPlan) -> HostPlan:
    """The plan without WireGuard devices, their peers, and their addresses, which bare links get beforehand."""
    tunnels = tunnel_addresses(plan)
    units = {
        name: {
            key: entry
            for key, entry in unit.items()
            if not isinstance(entry.object, WireguardLink | WireguardPeer)
            and not (isinstance(entry.object, LinkAddress) and entry.object.link in tunnels)
        }
        for name, unit in plan.units.items()
    }
    return replace(plan, units=units)


def tunnel_addresses(plan: HostPlan) -> dict[str, str]:
    """The address with its length of each tunnel's link, in the order of the links' names."""
    objects = plan.objects().values()
    names = {item.name for item in objects if isinstance(item, WireguardLink)}
    found = {item.link: f"{item.address}/{item.length}" for item in objects if isinstance(item, LinkAddress) and item.link in names}
    return dict(sorted(found.items()))


@contextmanager
def standing(plan: HostPlan, fillings: Mapping[str, Callable[[str], None]]) -> Iterator[dict[str, Gateway]]:
    """A gateway for each filling, which is called with its namespace. The caller holds the machine's claim for a lab (`lab.claimed`)."""
    with ExitStack() as stack:
        found = {}
        for name, fill in fillings.items():
            gateway = _bare(plan, f"{PREFIX}{name}", stack)
            fill(gateway.namespace)
            namespaces.script(_neighbours(seed_rules.targets(plan)), gateway.namespace)
            found[name] = gateway
        yield found


def applied(plan: HostPlan) -> Callable[[str], None]:
    """A filling: the plan, by the applier that hosts run, in one turn. Permanent when a unit could not be applied."""

    def apply() -> None:
        with TemporaryDirectory(prefix="meshmark-bench-") as folder:
            kernel = LinuxKernel(Path(folder))
            try:
                report = Applier(kernel, time.time).apply(without_tunnels(plan), 1, 1)
            finally:
                kernel.close()
        if failed := [f"{unit.unit}: {unit.error}" for unit in report.units if unit.outcome != "applied"]:
            msg = f"the plan was not applied: {'; '.join(failed)}"
            raise Permanent(msg)

    return lambda namespace: namespaces.inside(namespace, apply)


def written(plan: HostPlan, lines: Sequence[str], nftables: str = "") -> Callable[[str], None]:
    """A filling: the plan's links to nodes, then these lines of ``ip``, then this nftables."""

    def write(namespace: str) -> None:
        namespaces.script([*seed_rules.overlay(plan), *lines], namespace)
        namespaces.load_nft(namespace, nftables)

    return write


def _bare(plan: HostPlan, namespace: str, stack: ExitStack) -> Gateway:
    """Tunnels and uplink, and nothing that leads packets anywhere. The uplink has the gateway's own end of the overlay."""
    addresses = tunnel_addresses(plan)
    own = {item.local for item in plan.objects().values() if isinstance(item, VxlanLink)}
    namespaces.script([f"netns add {namespace}"])
    namespaces.set_sysctls(namespace, (*_NO_IPV6, *_FORWARDING))
    inlets = namespaces.inside(namespace, lambda: tuple(tun(name) for name in (*addresses, _UNDERLAY)))
    for inlet in inlets:
        stack.callback(os.close, inlet)
    lines = ["link set lo up", f"link add {UPLINK} txqueuelen 0 type ifb", f"link set {UPLINK} up"]
    lines += [f"address add {address}/32 dev {UPLINK}" for address in sorted(own)]
    lines += [f"route add default dev {UPLINK}", f"link set {_UNDERLAY} up"]
    for name, address in addresses.items():
        lines += [f"link set {name} txqueuelen 0 up", f"address add {address} dev {name}"]
    namespaces.script(lines, namespace)
    return Gateway(namespace, inlets)


def tun(name: str) -> int:
    """A tun device of this name in the thread's network namespace: what is written to it is a packet that came in by it."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, _IFREQ.pack(name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _neighbours(nodes: Sequence[Target]) -> list[str]:
    """What nodes would answer who are asked for their MAC address."""
    return [f"neighbour add {node.via} lladdr {NEIGHBOUR_MAC} dev {node.link.name} nud permanent" for node in nodes]
