"""``python -m benchmarks.micro``: the parts of pure computing, timed by pyperf in processes of its own. The options are pyperf's.

A part is prepared once in each process, from values alone: no kernel, no broker, no root. Its floor, where there is a sensible one, is a
benchmark of its own, whose name ends in ``floor``. The clock is processor time: nothing here waits, so another process's load counts less.
``benchmarks.figures.micro`` runs this and reads what it writes.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import struct
import time
from collections.abc import Callable, Iterable

import pyperf
from msgspec import Struct
from msgspec.structs import replace

from benchmarks import topologies
from benchmarks.figures.micro import FLOOR
from benchmarks.figures.nft_engine import encoded, keyed, planned_rule
from benchmarks.figures.nft_reading import plan
from benchmarks.kept_dump import KeptDumps, answers_of
from schemas import codec
from schemas.host_objects import NftChain, NftTable
from schemas.plan import Entry, HostPlan, SummedUnit, diff_units
from services.kernel.netlink import HEADER, attribute, message, text_attribute
from services.kernel.nfnetlink.wire import be32, be64
from services.kernel.nftrace import trace_events
from services.kernel.nftread.reading import Reading
from services.kernel.transaction import changes
from services.planner.compile import compile_host

_RULES, _TRACED, _NODES, _TUNNELS, _NODE_LENGTH = 10_000, 1_000, 100, 3, 26
_ATTRIBUTE = struct.Struct("=HH")
_TRACE_MESSAGE = 10 << 8 | 17  # NFNL_SUBSYS_NFTABLES, NFT_MSG_TRACE
_FAMILY = bytes((1, 0, 0, 0))

Work = Callable[[], object]


class Part(Struct, frozen=True):
    """Something to time: `prepare` makes the work of it, and that of its floor or None."""

    name: str
    prepare: Callable[[], tuple[Work, Work | None]]
    has_floor: bool = True


def encode_rules() -> tuple[Work, Work]:
    """Rules in four forms of a plan as one transaction's bytes. Floor: msgspec writes the same objects as JSON."""
    chain = NftChain("meshmark.bench", "rules", tuple(map(planned_rule, range(_RULES))), "filter", "forward", 0)
    batch = changes({}, keyed([NftTable(chain.table), chain]))
    return lambda: encoded(batch), lambda: codec.encode(chain)


def read_rules() -> tuple[Work, Work]:
    """A dump of rules and as many elements as objects, by a reader that remembers nothing. Floor: every attribute's head is looked at."""
    wanted = plan(_RULES).objects()
    answers = answers_of(wanted)
    reading = Reading(KeptDumps(answers), remembers=False)
    dump = [data for found in answers.values() for data in found]
    assert reading.read(wanted).keys() == wanted.keys()
    return lambda: reading.read(wanted), lambda: walk(dump)


def read_traces() -> tuple[Work, Work]:
    """Traces of packets as events. Floor: every attribute's head is looked at."""
    datagrams = list(map(trace_message, range(_TRACED)))
    return lambda: [list(trace_events(data)) for data in datagrams], lambda: walk(datagrams)


def compile_gateway() -> tuple[Work, None]:
    """The whole plan of a gateway with so many nodes. What must be done is what is done: there is no floor."""
    core = topologies.planner(topologies.mesh(_NODES, _TUNNELS, node_length=_NODE_LENGTH), _TUNNELS)
    return lambda: compile_host(core.state, core.allocations, topologies.GATEWAY), None


def digest_plan() -> tuple[Work, Work]:
    """The digest of a plan's unit, entry by entry. Floor: all of it written and digested in one piece."""
    [unit] = plan(_RULES).units.values()
    entries = list(unit.values())
    return lambda: SummedUnit.of(entries), lambda: hashlib.blake2b(codec.encode(entries), digest_size=16).digest()


def compare_plans() -> tuple[Work, Work]:
    """The difference of two plans without a common object, one chain of which is another. Floor: Python asks whether they are equal."""
    old, new = plan(_RULES), plan(_RULES)
    (name, unit), *_ = new.units.items()
    chain = next(entry.object for entry in unit.values() if isinstance(entry.object, NftChain))
    changed = SummedUnit.of([*unit.values(), Entry(replace(chain, rules=chain.rules[1:]), ())])
    other = HostPlan(new.cluster, new.host, {name: changed})
    assert len(diff_units(old.units, other.units)[0].put) == 1
    return lambda: diff_units(old.units, other.units), lambda: old.units == new.units


PARTS = (
    Part(f"encode-{_RULES}-rules", encode_rules),
    Part(f"read-{_RULES}-rules", read_rules),
    Part(f"read-{_TRACED}-traces", read_traces),
    Part(f"compile-{_NODES}-nodes", compile_gateway, has_floor=False),
    Part(f"digest-{_RULES}-rules", digest_plan),
    Part(f"compare-{_RULES}-rules", compare_plans),
)


def walk(datagrams: Iterable[bytes]) -> int:
    """How many attributes messages of nftables have, those in others not counted."""
    count = 0
    for data in datagrams:
        offset = 0
        while offset < len(data):
            length, *_ = HEADER.unpack_from(data, offset)
            end, at = offset + length, offset + HEADER.size + len(_FAMILY)
            while at < end:
                size, _ = _ATTRIBUTE.unpack_from(data, at)
                at += (size + 3) & ~3
                count += 1
            offset += (length + 3) & ~3
    return count


def trace_message(number: int) -> bytes:
    """A datagram about a packet at a rule: every fourth is the first of its chain and has the packet's headers. As Linux 6.18 has it."""
    at = [
        be32(4, 3),  # a rule
        be32(6, 0xB8458AEF + number // 12),  # the packet
        text_attribute(2, f"chain-{number // 4 % 3}"),
        text_attribute(1, "meshmark.trace"),
        be64(3, 6 + number % 4),  # the rule's handle
        attribute(5, be32(1, 0xFFFFFFFF)),  # its verdict: continue
    ]
    if number % 4:
        at.append(be32(14, 0x1000))  # the mark
    else:
        at += [
            be32(12, 2),  # the interface that it goes out by
            attribute(8, bytes.fromhex("45000021ff71400040113d587f0000017f000001")),
            attribute(9, bytes.fromhex("e5581e61000dfe2068656c6c6f")),
            be32(21, 8),  # the state of its connection
            attribute(19, bytes(1)),
            be32(18, 0x5AD3468A),
        ]
    return message(_TRACE_MESSAGE, _FAMILY + b"".join(at), 0)


@functools.cache
def prepared(part: Part) -> tuple[Work, Work | None]:
    """The part's work and its floor's, made once in a process."""
    works = part.prepare()
    gc.collect()
    gc.freeze()  # a service that has run for a while has its objects in the oldest generation as well
    return works


def timed(loops: int, part: Part, place: int) -> float:
    """Seconds of processor time that `loops` times of a part's work (place 0) or its floor's (1) take."""
    work = prepared(part)[place]
    assert work is not None
    began = time.process_time()
    for _ in range(loops):
        work()
    return time.process_time() - began


def main() -> None:
    runner = pyperf.Runner(program_args=("-m", "benchmarks.micro"))
    for part in PARTS:
        runner.bench_time_func(part.name, timed, part, 0)
        if part.has_floor:
            runner.bench_time_func(f"{part.name}{FLOOR}", timed, part, 1)


if __name__ == "__main__":
    main()
