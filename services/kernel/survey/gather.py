"""A survey, gathered: the one place that looks at everything. Reads only, in the network namespace of the calling thread."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from services.kernel.netlink import NETLINK_ROUTE, NetlinkSocket
from services.kernel.privilege import CAP_NET_ADMIN, has_capability
from services.kernel.survey import devices, foreign, netfilter, ports, probes
from services.kernel.survey.listeners import listeners
from services.kernel.survey.modules import Modules
from services.kernel.survey.values import Ability, Netfilter, Survey, Unknown
from services.kernel.sysctls import normal

T = TypeVar("T")

_PROC = Path("/proc")
_LIBNFTABLES = "libnftables.so.1"
_SYSCTLS = (
    "net/ipv4/ip_forward",
    "net/ipv4/fib_multipath_hash_policy",
    "net/ipv4/fib_multipath_hash_fields",
    "net/ipv4/fwmark_reflect",
    "net/ipv6/conf/all/disable_ipv6",
    "net/ipv6/conf/default/disable_ipv6",
)
_NFT_MODULES = ("nf_tables", "nft_chain_nat", "nft_ct", "nft_fib", "nf_nat", "nf_conntrack")


def survey(tables: Iterable[range], udp_ports: Iterable[int]) -> Survey:
    """Look at this host; `tables` and `udp_ports` are those that matter."""
    release = platform.release()
    modules = Modules(release)
    with contextlib.closing(NetlinkSocket(NETLINK_ROUTE)) as netlink:
        links = _known(lambda: foreign.links(netlink))
        rules, routes = _known(lambda: foreign.rules(netlink)), _known(lambda: foreign.routes(netlink, tables))
        uplinks = links if isinstance(links, Unknown) else _known(lambda: foreign.uplinks(netlink, links, _PROC / "sys"))
    return Survey(
        release=release,
        is_admin=has_capability(CAP_NET_ADMIN),
        libnftables=_has_libnftables(),
        abilities=_abilities(modules),
        wireguard_go=shutil.which("wireguard-go") is not None,
        tun=os.access("/dev/net/tun", os.R_OK | os.W_OK),
        sysctls={name: value for name in _SYSCTLS if (value := _sysctl(name)) is not None},
        sysctls_writable=os.access(_PROC / "sys/net/ipv4/ip_forward", os.W_OK),
        netfilter=_netfilter(modules),
        legacy=_known(_legacy),
        rules=rules,
        routes=routes,
        links=links if isinstance(links, Unknown) else devices.with_ports(links),
        ports=_known(lambda: ports.in_use(udp_ports)),
        uplinks=uplinks,
        listeners=listeners(),
    )


def _abilities(modules: Modules) -> dict[str, Ability]:
    found = {kind: modules.ability([kind], lambda kind=kind: probes.link(kind)) for kind in ("vxlan", "geneve", "wireguard")}  # type: ignore[misc]
    nft = modules.ability(["nf_tables"], lambda: Ability("yes"))
    # Their names differ between kernels, so that one which is not there says nothing.
    statements_there = not modules.may_load or all(modules.state(name) == "present" for name in _NFT_MODULES)
    if nft.state == "yes":
        nft = probes.nft_plan() if statements_there else Ability("installed", "nf_tables is loaded; trying more might load modules")
    found["nftables"] = nft
    found["conntrack"] = modules.ability(["nf_conntrack", "nf_conntrack_netlink"], probes.conntrack)
    found["nflog"] = modules.ability(["nf_tables", "nfnetlink_log", "nft_log"], lambda: probes.nft_statement("log group 5"))
    found["nftrace"] = modules.ability(["nf_tables"], lambda: probes.nft_statement("meta nftrace set 1"))
    found["resilient"] = probes.resilient_groups()
    return found


def _has_libnftables() -> bool:
    try:
        ctypes.CDLL(_LIBNFTABLES)
    except OSError:
        return False
    return True


def _netfilter(modules: Modules) -> Netfilter | Unknown:
    if modules.may_load and modules.state("nf_tables") != "present":
        return Netfilter()  # nobody can have a table, and asking would load the module
    return _known(netfilter.read)


def _legacy() -> tuple[str, ...]:
    """Tables of iptables that are in use without nftables, as ``ip filter``."""
    found = []
    for family, file in (("ip", "ip_tables_names"), ("ip6", "ip6_tables_names")):
        with contextlib.suppress(FileNotFoundError):
            found += [f"{family} {name}" for name in (_PROC / "thread-self/net" / file).read_text(encoding="ascii").split()]
    return tuple(found)


def _sysctl(name: str) -> str | None:
    try:
        return normal((_PROC / "sys" / name).read_text(encoding="ascii"))
    except OSError:
        return None


def _known(look: Callable[[], T]) -> T | Unknown:
    """What a look gives, or why there is nothing to be seen."""
    try:
        return look()
    except OSError as error:
        return Unknown(error.strerror or str(error))
