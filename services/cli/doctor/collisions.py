"""Whom meshmark would meet on this host: who else uses its marks, tables, priorities, names and ports, or stops what it forwards. Pure.

Which numbers those are, ``planner.layout`` says; what a host may need, but as it is told does not, is looked at as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from schemas.host_objects import TRACE_GROUP
from schemas.topology import Encryption, Marks, WireguardSettings
from services.cli.doctor.check import Check, Role, Verdict, listed
from services.cli.doctor.owners import owner
from services.kernel.survey.values import ForeignRoutes, LinkSeen, MarkUse, PortSeen, Survey, Unknown
from services.planner import layout
from services.planner.names import OWN_LINK_PREFIXES

_STRICT = 1
_LOOK = "look from the host, as root: ss -lunp"
_PUBLISHED = range(layout.PUBLISHED_TABLE, layout.PUBLISHED_TABLE + layout.PUBLISHED_TABLES)
_USES = {
    layout.ENCRYPT_TABLE: "to encrypt",
    layout.MESH_TABLE: "for the overlay between nodes, or an EgressPolicy",
    **dict.fromkeys(layout.EGRESS_TABLES, "for an EgressPolicy"),
}
"""What nodes need tables for that not all of them need."""


class Plans(Struct, frozen=True):
    """What a host is to be, and with which numbers: whether it encrypts, by which field of marks, and by which WireGuard ports."""

    role: Role = "gateway"
    encryption: Encryption = "none"
    mask: int = Marks().mask
    ports: tuple[int, ...] = ()

    @property
    def encrypts(self) -> bool:
        return self.role == "node" and self.encryption == "wireguard"

    @property
    def field(self) -> int:
        """The bits of packets' marks that are ours."""
        return layout.CLASS_MASK if self.role == "gateway" else self.mask

    @property
    def tables(self) -> tuple[int, ...]:
        """The route tables, but those of published routes that are given none."""
        return layout.GATEWAY_TABLES if self.role == "gateway" else layout.NODE_TABLES

    @property
    def table_spans(self) -> tuple[range, ...]:
        """All route tables."""
        return (*_spans(self.tables), _PUBLISHED)

    @property
    def priorities(self) -> tuple[int, ...]:
        """The priorities of policy rules, but those of published rules: which these are is known when they are published."""
        return layout.GATEWAY_RULES if self.role == "gateway" else layout.NODE_RULES

    def need_for(self, table: int) -> str:
        """What a table is needed for that may not be needed at all; empty when it is."""
        return "" if self.encrypts and table == layout.ENCRYPT_TABLE else _USES.get(table, "")


def checks(survey: Survey, plans: Plans) -> Iterator[Check]:
    """All checks of this kind."""
    yield _marks(survey, plans)
    yield _tables(survey, plans)
    yield _priorities(survey, plans)
    yield _links(survey)
    yield _ports(survey, plans)
    yield _listeners(survey, plans)
    yield _rp_filter(survey)
    yield _forwarding(survey)


def _marks(survey: Survey, plans: Plans) -> Check:
    uses = [*_rule_marks(survey), *(survey.netfilter.marks if not isinstance(survey.netfilter, Unknown) else ())]
    met = list(dict.fromkeys(_told(use) for use in uses if use.mask & plans.field))
    if met and plans.role == "gateway":
        advice = f"give the gateway a network namespace of its own, or take the other agent's marks out of {plans.field:#x}"
        return Check("marks", "problem", f"bits of {plans.field:#x} are used by others: {listed(met)}", advice)
    if met:
        words = "" if plans.encrypts else ", which a node needs to encrypt, or for an EgressPolicy,"
        advice = "give the cluster other `marks` (and doctor its mask by --marks), or take the other agent's away"
        detail = f"bits of {plans.field:#x}{words} are used by others: {listed(met)}"
        return Check("marks", "problem" if plans.encrypts else "warning", detail, advice)
    if blind := _blind(survey):
        return Check("marks", "unknown", f"no use of {plans.field:#x} was seen, but {listed(blind)}", "look there for marks by hand")
    return Check("marks", "ok", f"nobody uses bits of {plans.field:#x}" + (f"; {len(uses)} uses of other bits" if uses else ""))


def _rule_marks(survey: Survey) -> list[MarkUse]:
    rules = () if isinstance(survey.rules, Unknown) else survey.rules
    return [MarkUse(f"policy rule {rule.priority}", "matches", rule.mask, rule.fwmark) for rule in rules if rule.mask]


def _blind(survey: Survey) -> list[str]:
    """Where marks may be used without being seen from here."""
    found = []
    if isinstance(survey.rules, Unknown):
        found.append(f"policy rules cannot be read ({survey.rules.reason})")
    if isinstance(survey.netfilter, Unknown):
        found.append(f"nftables cannot be read ({survey.netfilter.reason})")
    else:
        found += [f"rules in table {name} were not understood" for name in survey.netfilter.opaque]
    return found + _legacy(survey)


def _legacy(survey: Survey) -> list[str]:
    if isinstance(survey.legacy, Unknown):
        return [f"iptables' own tables cannot be read ({survey.legacy.reason})"]
    return [f"iptables' own table {name} is not looked into (iptables-legacy-save shows it)" for name in survey.legacy]


def _told(use: MarkUse) -> str:
    known = owner(use.mask, use.value)
    return f"{use.text}{f' (as {known})' if known else ''}"


def _tables(survey: Survey, plans: Plans) -> Check:
    own = plans.table_spans
    names = _named(own)
    if isinstance(survey.routes, Unknown):
        return Check("route tables", "unknown", f"routes cannot be read ({survey.routes.reason})")
    met = [item for item in survey.routes if any(item.table in span for span in own)]
    held = [_held(item, plans) for item in sorted(met, key=lambda item: bool(plans.need_for(item.table)))]
    if held:
        needed = any(not plans.need_for(item.table) for item in met)
        return Check("route tables", "problem" if needed else "warning", listed(held), f"move them: meshmark needs {names} for itself")
    rules = () if isinstance(survey.rules, Unknown) else survey.rules
    users = [rule.text for rule in rules if any(rule.table in span for span in own)]
    if users:
        return Check("route tables", "warning", f"others look up meshmark's tables: {listed(users)}", "have them use another table")
    return Check("route tables", "ok", f"{names}: nobody else is there")


def _held(item: ForeignRoutes, plans: Plans) -> str:
    need = plans.need_for(item.table)
    return f"{item.count} IPv{item.family} routes of others in table {item.table}{f', which a node needs {need}' if need else ''}"


def _spans(numbers: Iterable[int]) -> tuple[range, ...]:
    """The numbers, those that follow each other as one."""
    found: list[range] = []
    for number in sorted(numbers):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return tuple(found)


def _named(spans: Iterable[range]) -> str:
    return ", ".join(str(span.start) if len(span) == 1 else f"{span.start} to {span.stop - 1}" for span in spans)


def _priorities(survey: Survey, plans: Plans) -> Check:
    own = plans.priorities
    names = _named(_spans(own))
    if isinstance(survey.rules, Unknown):
        return Check("rule priorities", "unknown", f"policy rules cannot be read ({survey.rules.reason})")
    met = [rule.text for rule in survey.rules if rule.priority in own]
    if met:
        advice = "among rules of one priority the older comes first: give the others another one"
        return Check("rule priorities", "warning", f"used by others: {listed(met)}", advice)
    return Check("rule priorities", "ok", f"{names}: nobody else is there")


def _links(survey: Survey) -> Check:
    if isinstance(survey.links, Unknown):
        return Check("link names", "unknown", f"links cannot be read ({survey.links.reason})")
    met = [link for link in survey.links if link.name.startswith(OWN_LINK_PREFIXES) and not link.is_own]
    if met:
        words = listed([f"{link.name} ({link.kind or 'physical'})" for link in met])
        return Check("link names", "problem", f"links that are not ours have names of ours: {words}", "rename or remove them")
    return Check("link names", "ok", f"no {' or '.join(f'{prefix}*' for prefix in OWN_LINK_PREFIXES)} of others")


def _ports(survey: Survey, plans: Plans) -> Check:
    if isinstance(survey.ports, Unknown):
        return Check("UDP ports", "unknown", f"ports cannot be read ({survey.ports.reason})")
    links = () if isinstance(survey.links, Unknown) else survey.links
    found = [judged for seen in survey.ports if (judged := _port(seen, links, plans)) is not None]
    worst = next((verdict for verdict in ("problem", "unknown", "warning") if any(check.verdict == verdict for check in found)), None)
    if worst is None:
        return Check("UDP ports", "ok", "free, or meshmark's own")
    advice = next(check.advice for check in found if check.verdict == worst)
    return Check("UDP ports", worst, listed([check.detail for check in found]), advice)  # type: ignore[arg-type]


def _port(seen: PortSeen, links: tuple[LinkSeen, ...], plans: Plans) -> Check | None:
    """What is wrong with a port that is in use; None when it is meshmark's own."""
    name, another = f"port {seen.port}", "choose another port for the peering"
    verdict: Verdict = "problem"
    if plans.role == "node" and seen.port in plans.ports:
        another = "choose another wireguard.port for the cluster, of which the next one is needed, too (and give doctor that by --port)"
        if not plans.encrypts:
            name, verdict = f"{name}, which a node needs to encrypt,", "warning"
    if seen.process is not None and not seen.process.startswith("wireguard-go"):
        return Check(name, verdict, f"{name} is taken by {seen.process}", f"stop it, or {another}")
    holders = [link for link in links if link.port == seen.port]
    foreign = [link for link in holders if not link.is_own]
    if holders and not foreign:
        return None
    if foreign and {link.kind for link in holders} in ({"vxlan"}, {"geneve"}):
        words = listed([link.name for link in foreign])
        return Check(
            name, "warning", f"{name} is shared with {words}", "that works while ids and remotes differ, and its options are plain"
        )
    if foreign:
        detail = f"{name} is taken by {foreign[0].kind} device {foreign[0].name}"
        return Check(name, verdict, detail, another)
    who = seen.process or "somebody who cannot be seen from here"
    return Check(name, "unknown", f"{name} is in use by {who}, and no device of this namespace says that it is its own", _LOOK)


def _listeners(survey: Survey, plans: Plans) -> Check:
    """Who hears the packets that the kernel shows, a node's in clear and those of a trace: of each group one program can."""
    audit = WireguardSettings().audit_group if plans.role == "node" else None
    groups = [group for group in (audit, TRACE_GROUP) if group is not None]
    heard = {group: survey.listeners[group] for group in groups if group in survey.listeners}
    others = {group: who for group, who in heard.items() if not who.startswith("meshmark")}
    found = others or heard
    if not found:
        return Check("NFLOG groups", "ok", f"nobody listens to {' or '.join(map(str, groups))}")
    detail = listed([f"{who or 'somebody who cannot be seen from here'} listens to {group}" for group, who in found.items()])
    if not others:
        return Check("NFLOG groups", "ok", detail)
    cure = "give the cluster's wireguard.auditGroup another number" if audit in others else "traces do not show what overlay packets carry"
    return Check("NFLOG groups", "warning", detail, f"fine if that is meshmark's auditor; else {cure}")


def _rp_filter(survey: Survey) -> Check:
    if isinstance(survey.uplinks, Unknown):
        return Check("rp_filter", "unknown", f"routes cannot be read ({survey.uplinks.reason})")
    if not survey.uplinks:
        return Check("rp_filter", "unknown", "no IPv4 default route, so no uplink to look at")
    strict = [link.name for link in survey.uplinks if link.rp_filter == _STRICT]
    if strict:
        advice = f"if the way back is by another link, packets are dropped: sysctl -w net.ipv4.conf.{strict[0]}.rp_filter=2"
        return Check("rp_filter", "warning", f"strict on the uplink {', '.join(strict)}", advice)
    return Check("rp_filter", "ok", "; ".join(f"{link.name}: {link.rp_filter}" for link in survey.uplinks))


def _forwarding(survey: Survey) -> Check:
    if isinstance(survey.netfilter, Unknown):
        return Check("forwarding", "unknown", f"nftables cannot be read ({survey.netfilter.reason})")
    drops = [f"{item.family} {item.table} {item.chain}" for item in survey.netfilter.drops]
    if drops:
        advice = "let it accept forwarded packets to and from mo.* and mt.*"
        return Check("forwarding", "warning", f"dropped unless a rule accepts it, by {listed(drops)}", advice)
    if unseen := [text for text in _legacy(survey) if "filter" in text or "cannot" in text]:
        return Check("forwarding", "unknown", listed(unseen), "iptables-legacy -S FORWARD shows the policy")
    return Check("forwarding", "ok", "no chain of others drops by policy")
