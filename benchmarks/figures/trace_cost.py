"""What packets of others pay while a flow is traced, on a node that encrypts.

The node of `encryption_audit`, with all rules of its plan. Between slices of packets the trace of another flow begins and ends, as the
applier makes it: with a port, and with the outer packets of two hosts. One round sends a slice without and one with it, in random order;
the clock is the sending thread's processor time, within which the kernel forwards. Floor: the same packets with no trace anywhere, which
is a difference of zero; so the figure is the difference, and the details have both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks import lab
from benchmarks.datagrams import datagram
from benchmarks.figures import encryption_audit as audit
from benchmarks.interval import interval
from benchmarks.result import Figure, Result, median, result, rounded
from benchmarks.rounds import Round, interleaved
from schemas.commands import TraceFlow
from schemas.values import Address
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX
from services.kernel.nft.text import table_text
from services.kernel.trace_table import TraceTable

CLOSED, OPEN = "nobody traces", "another flow is traced"
_ROUNDS = 60
_OTHERS = TraceFlow(
    (Address("10.200.1.20"), Address("10.200.2.20")),
    (Address("172.18.0.11"), Address("172.18.0.12")),
    (51871, 51872, 4789),
    600,
    ("tcp",),
    (443,),
    overlay_ports=(4789,),
)


def run(say: Callable[[str], None]) -> list[Result]:
    plan = audit.plan()
    with lab.claimed(), ExitStack() as stack:
        namespace = f"{PREFIX}traced"
        inlet = audit.node(namespace, stack)
        namespaces.load_nft(namespace, table_text(audit.variants(plan)[audit.WHOLE]))
        say("a node stands")
        return [summed_up(name, _measured(namespace, inlet, to)) for name, to in audit.WAYS.items()]


def _measured(namespace: str, inlet: int, to: str) -> list[Round]:
    """Rounds of nanoseconds per packet, after one slice that is not counted."""
    packet, table = datagram(audit.POD, to, audit.PORTS, audit.PAYLOAD), TraceTable()

    def taken(state: str) -> float:
        if state == OPEN:
            namespaces.inside(namespace, lambda: table.trace(_OTHERS, time.monotonic()))
        try:
            return audit.ns_per_packet(inlet, packet)
        finally:
            table.close()

    audit.ns_per_packet(inlet, packet)
    return interleaved((CLOSED, OPEN), _ROUNDS, taken)


def summed_up(name: str, rounds: Sequence[Round]) -> Result:
    """The figure of one destination: what a packet pays, with its 95 % interval."""

    def added(part: Sequence[Round]) -> float:
        return median(each[OPEN] - each[CLOSED] for each in part)

    found = interval(rounds, added)
    details: dict[str, object] = {
        "ns per packet": {state: rounded(median(part[state] for part in rounds)) for state in (CLOSED, OPEN)},
        "a trace of others adds ns": {"median": found.value, "from": found.low, "to": found.high},
    }
    return result(f"trace-cost-{name}", [part[OPEN] - part[CLOSED] for part in rounds], "ns", details=details)


FIGURE = Figure("trace-cost", "ns that a packet pays while another flow is traced", run, needs_root=True)
