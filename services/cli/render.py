"""A host's plan as a person would write it: nft text, `ip` lines, a WireGuard configuration, sysctls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas.host_objects import (
    MAIN_TABLE,
    OWN_PROTOCOL,
    FdbEntry,
    GeneveLink,
    LinkAddress,
    Neighbour,
    NftChain,
    NftElement,
    NftSet,
    NftTable,
    PlanObject,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.plan import HostPlan
from schemas.values import IPV6
from services.kernel.nft.statements import element_text, rule_text
from services.kernel.nft.text import chain_line, set_line, table_text


def plan_text(plan: HostPlan) -> str:
    """The whole plan of one host, section by section, in the order in which it is brought up."""
    objects = plan.objects()
    sections = [
        ("sysctl", [f"{item.name}={item.value}" for item in objects.values() if isinstance(item, Sysctl)]),
        ("ip route: guards", [ip_line(item) for item in objects.values() if isinstance(item, Route) and not item.hops]),
        ("ip rule", [ip_line(item) for item in _rules(objects.values())]),
        ("nft", [table_text(objects).rstrip()]),
        ("ip link and address", [line for item in objects.values() for line in _link_lines(item)]),
        ("wireguard", list(_wireguard_lines(objects.values()))),
        ("ip route", [ip_line(item) for item in objects.values() if isinstance(item, Route) and item.hops]),
    ]
    body = "\n".join(f"\n# {title}\n" + "\n".join(lines) for title, lines in sections if any(lines))
    return f"# host {plan.cluster}/{plan.host}{body or chr(10) + '# nothing'}\n"


def ip_line(item: Route | PolicyRule) -> str:
    """The arguments of the `ip` command that would make this route or rule."""
    if isinstance(item, Route):
        return f"ip {'-6 ' if item.prefix.family == IPV6 else ''}{_route(item)}"
    return f"ip {'-6 ' if item.family == IPV6 else ''}{_rule(item)}"


def object_lines(item: PlanObject) -> list[str]:
    """One object as a person would write it, line by line."""
    match item:
        case Sysctl():
            lines = [f"{item.name}={item.value}"]
        case Route() | PolicyRule():
            lines = [ip_line(item)]
        case NftTable():
            lines = [f"table inet {item.name}"]
        case NftSet():
            lines = [set_line(item)]
        case NftElement():
            lines = [element_text(item)]
        case NftChain():
            lines = [chain_line(item), *map(rule_text, item.rules)]
        case WireguardPeer():
            lines = list(_peer_lines(item))
        case _:
            lines = [*_link_lines(item), *_wireguard_lines([item])]
    return [part for line in lines for part in line.splitlines()]


def _route(item: Route) -> str:
    kind = "" if item.type == "unicast" else f"{item.type} "
    prefix = "default" if item.prefix.length == 0 else item.prefix.bare
    table = "" if item.table == MAIN_TABLE else f" table {item.table}"
    metric = f" metric {item.metric}" if item.metric else ""
    source = f" src {item.source}" if item.source else ""
    scope = f" scope {item.scope}" if item.scope else ""
    hops = [f"{f'via {hop.via} ' if hop.via else ''}dev {hop.link}{' onlink' if hop.onlink else ''}" for hop in item.hops]
    if len(hops) == 1:
        way, ways = f" {hops[0]}", ""
    else:  # next hops come last, and for several `ip` does not find the scope by itself
        way, ways = "", "".join(f" nexthop {text} weight {hop.weight}" for text, hop in zip(hops, item.hops, strict=True))
        scope = scope or (" scope link" if item.usual_scope == "link" else "")
    return f"route add {kind}{prefix}{way}{scope}{source}{table}{metric} proto {OWN_PROTOCOL}{ways}"


def _rules(items: Iterable[PlanObject]) -> list[PolicyRule]:
    """Rules with fewer prefixes come first: `ip` takes one for another that is there with a prefix more."""
    rules = (item for item in items if isinstance(item, PolicyRule))
    return sorted(rules, key=lambda item: (item.to is not None) + (item.source is not None))


def _rule(item: PolicyRule) -> str:
    source = f" from {item.source}" if item.source else ""
    mark = f" fwmark {item.fwmark:#x}/{item.mask:#x}" if item.mask else ""
    iif = f" iif {item.iif}" if item.iif else ""
    oif = f" oif {item.oif}" if item.oif else ""
    to = f" to {item.to}" if item.to else ""
    return f"rule add priority {item.priority}{source}{iif}{oif}{to}{mark} lookup {item.table} protocol {OWN_PROTOCOL}"


def _link_lines(item: PlanObject) -> Iterator[str]:
    match item:
        case VxlanLink():
            ends = f"local {item.local}{f' remote {item.remote}' if item.remote else ''} dstport {item.port}"
            yield f"ip link add {item.name} address {item.mac} mtu {item.mtu} type vxlan id {item.vni} {ends} nolearning"
            yield f"ip link set {item.name} up"
        case GeneveLink():
            ends = f"remote {item.remote} dstport {item.port}"
            yield f"ip link add {item.name} address {item.mac} type geneve id {item.vni} {ends}"
            yield f"ip link set {item.name} mtu {item.mtu} up"  # it takes no MTU while it is made
        case WireguardLink():
            yield f"ip link add {item.name} mtu {item.mtu} type wireguard"
            yield f"ip link set {item.name} up"
        case LinkAddress():
            at_once = " nodad" if item.address.family == IPV6 else ""
            yield f"ip address add {item.address}/{item.length} dev {item.link}{at_once}"
        case FdbEntry():
            yield f"bridge fdb replace {item.mac} dev {item.link} dst {item.remote} self permanent"
        case Neighbour():
            yield f"ip neigh replace {item.address} lladdr {item.mac} dev {item.link} nud permanent"


def _wireguard_lines(objects: Iterable[PlanObject]) -> Iterator[str]:
    known = list(objects)
    for link in known:
        if isinstance(link, WireguardLink):
            yield f"# {link.name}"
            mark = f"\nFwMark = {link.fwmark:#x}" if link.fwmark else ""
            yield f"[Interface]\nListenPort = {link.listen_port}{mark}\n# PrivateKey: made on the host, never leaves it"
            for peer in known:
                if isinstance(peer, WireguardPeer) and peer.link == link.name:
                    yield from _peer_lines(peer)


def _peer_lines(peer: WireguardPeer) -> Iterator[str]:
    endpoint = f"\nEndpoint = {peer.endpoint}" if peer.endpoint else ""
    yield f"[Peer]\nPublicKey = {peer.public_key}{endpoint}\nAllowedIPs = {', '.join(peer.allowed_ips)}"
    if peer.keepalive_seconds:
        yield f"PersistentKeepalive = {peer.keepalive_seconds}"
