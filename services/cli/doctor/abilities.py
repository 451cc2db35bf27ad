"""What the kernel and its tools can do, judged by what meshmark needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from schemas.topology import Overlay
from services.cli.doctor.check import Check, Role, Verdict
from services.kernel.survey.values import Ability, Survey

_HASH_POLICY = "net/ipv4/fib_multipath_hash_policy"
_HASH_FIELDS = "net/ipv4/fib_multipath_hash_fields"
_FORWARD = "net/ipv4/ip_forward"
_DISABLE_IPV6 = ("net/ipv6/conf/all/disable_ipv6", "net/ipv6/conf/default/disable_ipv6")
_UNUSED = "nothing in this version needs it"


def checks(survey: Survey, role: Role, overlay: Overlay, *, encrypts: bool = False) -> Iterator[Check]:
    """All checks of this kind, in the order in which one would fix what is wrong."""
    yield Check("kernel", "ok", f"Linux {survey.release}")
    yield _rights(survey)
    yield _nftables(survey)
    yield _needed("connection tracking", survey.abilities["conntrack"], "load the module nf_conntrack_netlink, or use a kernel that has it")
    yield _needed(overlay, survey.abilities[overlay], f"load the module {overlay}, use a kernel that has it, or choose the other overlay")
    yield _wireguard(survey, needed=encrypts or role == "gateway")
    yield _multipath(survey, role)
    yield _sysctls(survey, role)
    yield _ipv6(survey)
    other = "vxlan" if overlay == "geneve" else "geneve"
    yield _optional(other, survey.abilities[other], f"a cluster with {overlay} does not need it")
    yield _nflog(survey, role)
    for name, ability in (("resilient next hops", "resilient"), ("nftrace", "nftrace")):
        yield _optional(name, survey.abilities[ability], _UNUSED)


def _rights(survey: Survey) -> Check:
    if survey.is_admin:
        return Check("rights", "ok", "CAP_NET_ADMIN is here")
    return Check("rights", "unknown", "no CAP_NET_ADMIN, so that not everything can be looked at", "run doctor as root")


def _nftables(survey: Survey) -> Check:
    if not survey.libnftables:
        return Check("nftables", "problem", "there is no libnftables.so.1", "install the package libnftables1 (Debian) or nftables")
    return _needed(
        "nftables", survey.abilities["nftables"], "use a kernel with nftables, nft_nat, nft_fib and nft_ct, and libnftables 1.0.6 or newer"
    )


def _wireguard(survey: Survey, *, needed: bool) -> Check:
    kernel = survey.abilities["wireguard"]
    if kernel.state in ("yes", "installed"):
        return Check("WireGuard", "ok", f"in the kernel: {kernel.detail}")
    if survey.wireguard_go and survey.tun:
        known = "not in the kernel" if kernel.state == "no" else f"in the kernel: not known ({kernel.detail})"
        return Check("WireGuard", "ok", f"{known}; wireguard-go and /dev/net/tun are here")
    if not needed:
        return Check("WireGuard", "ok", "not here, and a node needs it to encrypt only")
    lacking = "wireguard-go" if not survey.wireguard_go else "/dev/net/tun"
    verdict: Verdict = "unknown" if kernel.state == "unknown" else "problem"
    advice = "modprobe wireguard; or install wireguard-go and give the applier /dev/net/tun"
    return Check("WireGuard", verdict, f"in the kernel: {kernel.detail}; and there is no {lacking}", advice)


def _multipath(survey: Survey, role: Role) -> Check:
    missing = [name for name in (_HASH_POLICY, _HASH_FIELDS) if name not in survey.sysctls]
    if not missing:
        return Check("multipath hash", "ok", "flows can be spread over tunnels by packet (fib_multipath_hash_fields)")
    if role == "node":
        return Check("multipath hash", "ok", "not here, and a node has one way only")
    return Check("multipath hash", "problem", f"no sysctl {', '.join(missing)}", "use Linux 5.14 or newer with CONFIG_IP_ROUTE_MULTIPATH")


def _nflog(survey: Survey, role: Role) -> Check:
    ability = survey.abilities["nflog"]
    if role == "gateway" or ability.state != "no":
        return _optional("NFLOG", ability, "nodes that encrypt need it, and traces to show what overlay packets carry")
    advice = "load the modules nft_log and nfnetlink_log; or, for a cluster that encrypts, set wireguard.auditGroup to null"
    return Check("NFLOG", "warning", f"not here ({ability.detail}): nodes that encrypt show packets in clear by it", advice)


def _sysctls(survey: Survey, role: Role) -> Check:
    if survey.sysctls_writable:
        return Check("/proc/sys/net", "ok", "writable")
    if role == "node" and survey.sysctls.get(_FORWARD) == "1":
        return Check("/proc/sys/net", "ok", "not writable, but forwarding is on, which is all that a node needs")
    advice = "mount /proc/sys writable (docs/deploy.md, Containers), or run as root"
    return Check("/proc/sys/net", "problem", "not writable: forwarding and multipath hashing cannot be turned on", advice)


def _ipv6(survey: Survey) -> Check:
    found = [survey.sysctls[name] for name in _DISABLE_IPV6 if name in survey.sysctls]
    if not found:
        return Check(
            "IPv6", "warning", "this kernel has none, or it is off", "without IPv6 prefixes in the topology there is nothing to do"
        )
    if "1" in found:
        return Check(
            "IPv6",
            "warning",
            "disabled for all or for new links (disable_ipv6)",
            "sysctl -w net.ipv6.conf.all.disable_ipv6=0, if it is wanted",
        )
    return Check("IPv6", "ok", "on")


def _needed(name: str, ability: Ability, advice: str) -> Check:
    verdict: Verdict = {"yes": "ok", "installed": "ok", "no": "problem", "unknown": "unknown"}[ability.state]  # type: ignore[assignment]
    return Check(name, verdict, ability.detail, advice if verdict != "ok" else "")


def _optional(name: str, ability: Ability, unneeded: str) -> Check:
    if ability.state == "unknown":
        return Check(name, "unknown", f"{ability.detail}; {unneeded}")
    return Check(name, "ok", ability.detail if ability.state != "no" else f"not here ({ability.detail}); {unneeded}")
