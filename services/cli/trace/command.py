"""``meshmark trace``: whether a flow was encrypted, on every way between two hosts, in both directions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from msgspec.structs import replace

from schemas import codec
from schemas.commands import TRACE_SAMPLE_MAX, TRACE_SECONDS_MAX
from schemas.flow import FlowEvent, FlowMessage
from schemas.values import Address
from services.auditor.trace.carriers import seconds
from services.auditor.trace.trails import Trail, Way
from services.auditor.trace.verdicts import Tally, judged
from services.cli import records
from services.cli.numbers import Whole
from services.cli.output import EXIT_DIFFERENT, EXIT_NOTHING, console, emit_line, note, show_table
from services.cli.session import Nats
from services.cli.trace import forms
from services.cli.trace.ends import Session, session
from services.cli.trace.filters import Filters, span_s
from services.cli.trace.live import packets
from services.planner.state import State
from services.runtime.errors import Permanent

Form = Literal["compact", "table", "json", "path"]

_FOR = "30s"
_TRAILS_MAX = 5000
_NO_FILTERS = Filters()

From = Annotated[str, Parameter(name="--from", help="One end: CLUSTER/POD, CLUSTER/NODE, or an address")]
To = Annotated[str, Parameter(name="--to", help="The other end, in the same way; packets are shown in both directions")]
ClusterName = Annotated[str | None, Parameter(help="Cluster of ends that are given without one, and the only one to look for addresses in")]
Services = Annotated[
    list[str] | None,
    Parameter(name="--service", help="Address by which --from dials --to, as a service's; may be given several times", negative=()),
]
For = Annotated[
    str | None,
    Parameter(name="--for", help=f"How long to look, at most 10m; the hosts forget it by then, whatever happens [default: {_FOR}]"),
]
Follow = Annotated[bool, Parameter(help="Go on until interrupted, and give the answer then", negative=())]
Sample = Annotated[
    Whole, Parameter(help=f"Have hosts tell of one IPv4 packet of so many, each of the same ones; a power of two up to {TRACE_SAMPLE_MAX}")
]
Output = Annotated[
    Form | None, Parameter(alias="-o", help="compact: a line for each point; table; json: as Hubble's; path: hosts, and the ways between")
]
Input = Annotated[Path | None, Parameter(help="Read what --output json wrote, instead of asking hosts")]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(trace)


async def trace(
    *,
    source: From,
    destination: To,
    cluster: ClusterName = None,
    service: Services = None,
    duration: For = None,
    follow: Follow = False,
    sample: Sample = 1,
    output: Output = None,
    filters: Filters = _NO_FILTERS,
    input_file: Input = None,
    nats: Nats | None = None,
) -> int:
    r"""Show where a flow's packets go, and whether they were encrypted on every way between two hosts, in both directions.

    The hosts on the flow's way (nodes, and the gateways between clusters) are asked to tell of its packets for a while. Each line is a
    packet at a point of a host: from-endpoint, to-stack, to-host, from-host, to-overlay, to-crypto, to-network, from-network, from-crypto,
    from-overlay, to-endpoint; or a drop, with the rule that dropped it. Outer packets are shown with the packet that they carry.

    A packet is `encrypted` when it was on every way between two hosts, `plaintext` when on none, `partial` when on some, and `unknown`
    where nothing was seen that says so. Nothing is sent: let the ends speak meanwhile, as in the lab by `meshmark lab check`. Of a busy
    flow, hosts tell of 200 packets a second, each of its own: with --sample each tells of the same ones.

    The exit code is 2 when a packet that is shown went in clear between two hosts, and 3 when no packet of the flow was seen at all.

    ```sh
    meshmark trace --from rome/shop --to rome/stock
    meshmark trace --from rome/shop --to milan/bank --for 10s --output path
    meshmark trace --from rome/shop --to rome/stock --service 10.96.0.1
    meshmark trace --from 10.200.1.10 --to 10.200.2.10 --cluster rome \
        --port 443 --unencrypted --first 1
    meshmark trace --from rome/shop --to rome/stock --output json > seen.json
    meshmark trace --from rome/shop --to rome/stock --input-file seen.json \
        --output path --last 1
    ```
    """
    form = output or ("compact" if sys.stdout.isatty() else "json")
    of_hosts = (("--follow", follow), ("--for", duration is not None), ("--sample", sample != 1))
    if input_file is not None and (given := [option for option, is_given in of_hosts if is_given]):
        msg = f"{', '.join(given)}: for hosts that are asked, and --input-file asks none; leave out one or the other"
        raise Permanent(msg)
    seconds = span_s(_FOR if duration is None else duration)
    if not 1 <= seconds <= TRACE_SECONDS_MAX:
        msg = f"--for {duration}: between 1s and {TRACE_SECONDS_MAX // 60}m, please; --follow goes on for longer"
        raise Permanent(msg)
    if not 1 <= sample <= TRACE_SAMPLE_MAX or sample & (sample - 1):
        msg = f"--sample {sample}: a power of two between 1 and {TRACE_SAMPLE_MAX}, please"
        raise Permanent(msg)
    filters.check()
    async with (nats or Nats()).connect() as broker:
        # Allocations are written before what they are for is admitted.
        admitted, allocations = await records.admitted(broker), await records.allocations(broker)
        state = State(admitted, allocations.remaps)
        named, services, only = (source, destination), _addresses(service or ()), filters.only(sample)
        wanted = session(state, allocations, named, cluster, int(seconds), only=only, services=services)
        recorded = _recorded(input_file) if input_file is not None else []
        filters = filters.among((*wanted.route, *(event.node_name for event in recorded)), cluster)
        teller = Teller(wanted, filters, form, is_live=input_file is None)
        if input_file is not None:
            teller.tell(wanted.trails(recorded))
        else:
            async with contextlib.aclosing(packets(broker, wanted, follow=follow)) as told:
                async for found in told:
                    teller.tell(found)
                    if teller.is_full:
                        break
    return teller.end()


class Teller:
    """Shows packets in a form, as they come or at the end, and keeps what the answer is made of. `is_live`: hosts tell of them now."""

    def __init__(self, wanted: Session, filters: Filters, form: Form, *, is_live: bool) -> None:
        self._wanted = wanted
        self._is_live = is_live
        self._seen = 0
        self._filters = filters
        self._form = form
        self._kept: list[Trail] = []
        self._given_up = 0
        self._count = 0
        self._points = 0
        self._newest_s = 0.0
        self._tally = Tally()
        self._at_once = form in ("compact", "json") and not filters.last and filters.since is None

    @property
    def is_full(self) -> bool:
        """Whether as many packets were shown as were wanted."""
        return self._filters.first is not None and self._count >= self._filters.first

    def tell(self, found: Iterable[Trail]) -> None:
        """Take packets in, and show those that are wanted, if that is to be now."""
        new = list(found)
        self._seen += len(new)
        chosen = self._filters.chosen(new)
        if self._at_once:
            if self._filters.first is not None:
                chosen = chosen[: self._filters.first - self._count]
            self._count += len(chosen)
            self._tally.add(chosen)
            self._show(chosen)
        else:
            self._keep(new, chosen)

    def _keep(self, new: list[Trail], chosen: list[Trail]) -> None:
        """Hold what may be shown at the end. Bounded, but for a recording: of more, the oldest are judged, and not shown."""
        if self._filters.since is not None:
            self._newest_s = max([self._newest_s, *(seconds(event) for trail in new for event in trail.seen)])
        kept = self._filters.recent([*self._kept, *chosen], self._newest_s)[: self._filters.first]
        self._count = len(kept)
        over = max(0, len(kept) - self._most) if self._is_live else 0
        if not self._filters.last:
            self._given_up += over
            self._tally.add(kept[:over])
        self._kept = kept[over:]

    @property
    def _most(self) -> int:
        """How many packets are held at most; those that were asked for by number are."""
        return max(_TRAILS_MAX, self._filters.first or 0, self._filters.last or 0)

    def end(self) -> int:
        """Show what is shown at the end; returns the exit code."""
        if not self._at_once:
            kept = self._kept[-self._filters.last :] if self._filters.last else self._kept
            self._tally.add(kept)
            self._show(kept)
        if self._given_up:
            note(f"{self._given_up} packets before the last {len(self._kept)} are judged, but not shown: no more are held")
        found = self._tally.courses()
        if self._form != "json":
            lines = forms.summary(found, self._wanted) if self._form != "path" else ()
            for line in (*lines, *forms.both_ways(found, self._wanted)):
                console.print(line)
        if not self._seen:
            note(self._nothing())
            return EXIT_NOTHING
        if not found:
            note(f"{self._seen} packets of the flow were seen, none of those that the filters choose")
        elif not self._points:
            note(f"{self._seen} packets of the flow were seen, at no point that --node, --ip and --verdict choose")
        return EXIT_DIFFERENT if any(course.verdict in ("plaintext", "partial") for course in found) else 0

    def _nothing(self) -> str:
        """What to say when no packet of the flow was seen, and how to have some."""
        said = f"no packet was seen between {self._wanted.source.name} and {self._wanted.destination.name}"
        if not self._is_live:
            return said
        return f"{said}; a trace sends none itself: let the ends speak meanwhile, as in the lab by: meshmark lab check"

    def _show(self, found: list[Trail]) -> None:
        events = [(way, self._named(way, event)) for way, event in self._filters.points(judged(found))]
        self._points += len(events)
        match self._form:
            case "compact":
                for way, event in events:
                    console.print(forms.compact(event, way, self._wanted))
            case "table" if events:
                show_table(forms.COLUMNS, [forms.row(event, way, self._wanted) for way, event in events])
            case "json":
                for _, event in events:
                    emit_line(FlowMessage(event.node_name, event.time, event))
            case "path":
                for line in forms.paths(found, self._tally.courses(), self._wanted):
                    console.print(line)

    def _named(self, way: Way | None, event: FlowEvent) -> FlowEvent:
        """The event with who its ends are."""
        wanted = self._wanted
        if way is None:
            return event
        ends = (wanted.source, wanted.destination) if way == "forward" else (wanted.destination, wanted.source)
        return replace(event, source=ends[0].known, destination=ends[1].known)


def _addresses(texts: Iterable[str]) -> list[Address]:
    """Addresses as they are written; Permanent says which one is none."""
    try:
        return [Address.parse(text) for text in texts]
    except ValueError as error:
        msg = f"--service: {error}"
        raise Permanent(msg) from error


def _recorded(path: Path) -> list[FlowEvent]:
    """The events in a file of flow messages, one a line: judged all together, however many. One that is told twice is one.

    Bytes until they are decoded, so that what is no text is named by its line, and no other character than a newline ends one.
    """
    events: dict[str, FlowEvent] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            message = codec.decode(line, FlowMessage)
        except codec.DecodeError as error:
            msg = f"{path}, line {number}: {error}"
            raise Permanent(msg) from None
        if message.flow is not None:
            events[message.flow.uuid] = message.flow
    return list(events.values())
