"""How a trace is shown: a line for each point, a table of them, or each direction's path from host to host. Pure: text out.

Text for people has rich markup; what comes from packets and names is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from rich.markup import escape

from schemas.encryption import said
from schemas.flow import IP, Encryption, FlowEvent, Layer4, NftPlace
from services.auditor.trace.flows import wrapping
from services.auditor.trace.groups import HEADERS
from services.auditor.trace.trails import Trail, Way
from services.auditor.trace.verdicts import UNSEEN, Course, Crossing, Hop, crossings, verdict
from services.cli.trace.ends import Session
from services.cli.trace.filters import ports_of

COLUMNS = ("TIMESTAMP", "NODE", "SOURCE", "DESTINATION", "POINT", "VERDICT", "ENCRYPTION", "DEVICE", "SUMMARY")
_COLOURS: dict[Encryption, str] = {"encrypted": "green", "plaintext": "red", "partial": "yellow", "unknown": "dim"}
_INDENT = " " * 4
_ARROWS: dict[Way, str] = {"forward": "→", "reply": "←"}


def point_of(event: FlowEvent) -> str:
    """The point as people write it: to-crypto; of a drop, that."""
    return event.trace_observation_point.lower().replace("_", "-") if event.verdict == "FORWARDED" else "dropped"


def compact(event: FlowEvent, way: Way | None, session: Session) -> str:
    """One point in one line, as ``hubble observe`` writes it, and behind it what that does not know.

    The first end of the flow is on the left: ``->`` goes from there, ``<-`` back, and ``<>`` is an outer packet as it goes.
    """
    source, destination = _ends(event, way, session)
    arrow = {"forward": "->", "reply": "<-"}.get(way or "", "<>")
    if way == "reply":
        source, destination = destination, source
    words = [
        f"{_time(event)} [{event.node_name}]: {source} {arrow} {destination}",
        f"{point_of(event) if event.verdict == 'FORWARDED' else ''} {event.verdict}".strip(),
        f"({event.summary})",
        *_more(event),
    ]
    return escape(" ".join(words)) + f" {_coloured(event)}".rstrip()


def row(event: FlowEvent, way: Way | None, session: Session) -> list[str]:
    """One point as cells under ``COLUMNS``."""
    source, destination = _ends(event, way, session)
    link = event.interface.name if event.interface else ""
    cells = [_time(event), event.node_name, source, destination, point_of(event), event.verdict]
    return [*map(escape, cells), _coloured(event), escape(link), escape(" ".join((event.summary, *_wrapping(event), *_reason(event))))]


def summary(courses: Iterable[Course], session: Session) -> Iterator[str]:
    """Each direction's answer in a line."""
    for course in courses:
        here, there = (session.source, session.destination) if course.way == "forward" else (session.destination, session.source)
        dropped = f", {course.dropped} dropped" if course.dropped else ""
        packets = f"{course.packets} packet{'' if course.packets == 1 else 's'}{dropped}"
        yield f"{escape(f'{here.name} → {there.name}')}: {_paint(course.verdict)} ({packets})"
        yield from (f"{_INDENT}{_hop(hop)}" for hop in course.hops)


def both_ways(courses: Sequence[Course], session: Session) -> Iterator[str]:
    """The flow's answer in a line, where both directions were seen; which one differs is named."""
    if len(courses) < len(_ARROWS):
        return
    known = [course.verdict for course in courses]
    each = ", ".join(f"{_ARROWS[course.way]} {_paint(course.verdict)}" for course in courses)
    named = f" ({each})" if len(set(known)) > 1 else ""
    yield f"{escape(f'{session.source.name} ↔ {session.destination.name}')}: {_paint(verdict(known))}{named}"


def paths(found: Sequence[Trail], courses: Iterable[Course], session: Session) -> Iterator[str]:
    """Each direction, drawn by the way of one of its packets: the first that was seen on most hosts, which is named.

    Of a direction without any of `found`, there is its answer alone.
    """
    for course in courses:
        trails = [trail for trail in found if trail.way == course.way]
        yield from summary([course], session)
        yield ""
        if not trails:
            continue
        place = max(range(len(trails)), key=lambda index: (len(trails[index].nodes()), len(trails[index].seen) + len(trails[index].outer)))
        if len(trails) > 1:
            when = _time(trails[place].seen[0])
            yield f"  [dim]packet {place + 1} of {len(trails)}, the first that was seen at most points, at {when}:[/]"
        yield from _drawn(trails[place])
        yield ""


def _drawn(trail: Trail) -> Iterator[str]:
    ways = {(crossing.source, crossing.destination): crossing for crossing in crossings(trail)}
    nodes = trail.nodes()
    if nodes and (before := ways.get((UNSEEN, nodes[0]))) is not None:
        yield _drawn_crossing(before)
    for place, node in enumerate(nodes):
        yield f"  [bold]{escape(node)}[/]"
        yield from (_drawn_point(event) for event in trail.at(node))
        following = nodes[place + 1] if place + 1 < len(nodes) else UNSEEN
        if (crossing := ways.get((node, following))) is not None:
            yield _drawn_crossing(crossing)


def _drawn_point(event: FlowEvent) -> str:
    link = event.interface.name if event.interface else ""
    name = "DROPPED" if event.verdict == "DROPPED" else point_of(event)
    found, l4 = _shown(event)
    ends = f"{_with_port(found.source, l4, source=True)} → {_with_port(found.destination, l4, source=False)}" if found else ""
    words = [f"{_INDENT}{name:13} {link:15} {ends}", f"({event.summary})", *_more(event, link=False)]
    if event.corr is not None and (event.corr.method != HEADERS or event.tunnel is not None):
        words.append(f"[{event.corr.method}: {event.corr.confidence}]")
    return escape(" ".join(words))


def _drawn_crossing(crossing: Crossing) -> str:
    said = "; ".join(f"{one.node}: {one.method} ({one.confidence})" for one in crossing.evidence) or "nothing was seen that says how"
    return f"  [{_COLOURS[crossing.verdict]}]│ {crossing.verdict}[/] [dim]{escape(said)}[/]"


def _hop(hop: Hop) -> str:
    counts = [("encrypted", hop.encrypted), ("in clear", hop.plaintext), ("partly in clear", hop.partial), ("unknown", hop.unknown)]
    text = ", ".join(f"{count} {word}" for word, count in counts if count)
    return f"{escape(f'{_named(hop.source)} → {_named(hop.destination)}')}: {_paint(hop.verdict)} ({text})"


def _named(node: str) -> str:
    return "(not seen)" if node == UNSEEN else node


def _paint(known: Encryption) -> str:
    return f"[{_COLOURS[known]}]{known}[/]"


def _coloured(event: FlowEvent) -> str:
    return _paint(event.encryption) if event.encryption else ""


def _time(event: FlowEvent) -> str:
    return datetime.fromisoformat(event.time).strftime("%b %e %H:%M:%S.%f")


def _ends(event: FlowEvent, way: Way | None, session: Session) -> tuple[str, str]:
    """Source and destination, with who that is."""
    found, l4 = _shown(event)
    if found is None:
        return "?", "?"
    ends = {"forward": (session.source, session.destination), "reply": (session.destination, session.source)}.get(way or "", (None, None))
    source, destination = (
        _with_port(address, l4, source=is_source) + (f" ({end.name})" if end is not None and end.name != address else "")
        for end, address, is_source in ((ends[0], found.source, True), (ends[1], found.destination, False))
    )
    return source, destination


def _shown(event: FlowEvent) -> tuple[IP | None, Layer4 | None]:
    """The addresses and ports that stand for a packet: those inside, where they are known."""
    return (event.outer, event.tunnel.l4) if event.ip is None and event.tunnel is not None else (event.ip, event.l4)


def _with_port(address: str, l4: Layer4 | None, *, source: bool) -> str:
    ports = ports_of(l4)
    if ports is None or not (ports.source_port or ports.destination_port):
        return address
    number = ports.source_port if source else ports.destination_port
    return f"[{address}]:{number}" if ":" in address else f"{address}:{number}"


def _more(event: FlowEvent, *, link: bool = True) -> Iterator[str]:
    """What is known of a point beside the packet: what is around it, link, mark, translation, outer encryption, why it was dropped."""
    yield from _wrapping(event)
    if link and event.interface and event.interface.name:
        yield f"dev {event.interface.name}"
    if event.mark:
        yield f"mark {event.mark:#x}"
    if event.ip is not None and event.ip.source_xlated:
        yield f"snat {event.ip.source_xlated}"
    if event.ip is not None and event.ip.destination_xlated:
        yield f"dnat {event.ip.destination_xlated}"
    if event.wg is not None and event.wg.counter is not None:
        yield f"wg {event.wg.receiver_index:#x} #{event.wg.counter}"
    if event.ip is not None and event.ip.encrypted:
        yield "encrypted outer packet"
    yield from _reason(event)


def _wrapping(event: FlowEvent) -> Iterator[str]:
    """The overlay packet around one that is shown itself."""
    found = event.tunnel
    if event.ip is not None and found is not None:
        ends = (_with_port(address, found.l4, source=place == 0) for place, address in enumerate((found.ip.source, found.ip.destination)))
        yield f"in {wrapping(found)} {' → '.join(ends)}"


def _place(found: NftPlace) -> str:
    """The rule or policy that dropped a packet, and what the rule's comment says."""
    where = f"{found.family} {found.table} {found.chain} {f'handle {found.handle}' if found.handle else 'policy'}"
    return f"{where}: {said(found.comment)}" if found.comment else where


def _reason(event: FlowEvent) -> Iterator[str]:
    if event.verdict == "DROPPED":
        yield f"dropped by {_place(event.nft)}" if event.nft is not None else "dropped"
        if event.because:
            yield f"because {', '.join(event.because)}"
