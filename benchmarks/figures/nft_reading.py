"""Reading own nftables and comparing them with the plan: nothing written, something written elsewhere, one rule changed.

A table with N rules in chains of 250 (`meta mark X ip daddr Y accept`) and a hash map of N elements. Idle: what the auditor does while
nobody wrote anything since it found nothing. Full: somebody has written to another table, so everything of ours is looked at. Anew: the
same by a reader that remembers nothing of what it read before, as at a start. One rule: a chain has one rule more, which is found. All of
it through the drivers, the reference and the comparison that the auditor uses. The clock is processor time. `resident MiB` is what the
first look adds to the process, with the form of the wanted rules and all that it remembers, and what it has at most on the way.

Floor: a dump of the same rules and elements that is received and not looked at; for `idle`, it shows what is saved. Peer: ``nft -j list
table``, not parsed. Variants take turns. Goals: idle a thousandth of the floor; full 1.8 times the floor and a quarter of the peer's time,
whichever is less; anew the same.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bare_netlink import BareNetlink, in_new_network, spent_ms
from benchmarks.result import Details, Figure, Result, median, result, rounded
from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.nft import Match, Verdict
from schemas.plan import Entry, HostPlan, SummedUnit, unit_tag
from schemas.values import Name
from services.auditor.compare import compare
from services.auditor.findings import Finding, View
from services.auditor.unchanged import Unchanged
from services.kernel.linux import LinuxKernel
from services.kernel.netlink import NETLINK_NETFILTER, text_attribute
from services.kernel.transaction import Change, Marker
from services.runtime.errors import Permanent

_SIZES = {10_000: 9, 50_000: 5}
"""How many rounds are measured at each number of rules and of elements."""
_IDLE_PER_ROUND = 20
_TABLE, _MAP, _UNIT = "meshmark.bench", "marks", "bench/rome/bench"
_RULES_PER_CHAIN = 250
_GET_RULE, _GET_ELEMENTS = 10 << 8 | 7, 10 << 8 | 13
_INET = bytes((1, 0, 0, 0))
_IN_TABLE = _INET + text_attribute(1, _TABLE)
_GOAL_IDLE, _GOAL_FLOOR, _GOAL_PEER = 1e-3, 1.8, 0.25

Samples = Mapping[str, list[float]]
"""Milliseconds by what was measured."""


def run(say: Callable[[str], None]) -> list[Result]:
    found: list[Result] = []
    for size, rounds in _SIZES.items():
        samples, resident = in_new_network(lambda size=size, rounds=rounds: _measure(size, rounds))  # type: ignore[misc]
        say(f"{size} rules and elements in {rounds} rounds")
        found += summed_up(size, samples, resident)
    return found


def plan(size: int) -> HostPlan:
    """So many rules and as many elements."""
    objects: list[PlanObject] = [NftTable(_TABLE), NftSet(_TABLE, _MAP, "ipv4_addr", "mark")]
    objects += [NftElement(_TABLE, _MAP, _address(number), f"{number + 1:#x}") for number in range(size)]
    for first in range(0, size, _RULES_PER_CHAIN):
        numbers = range(first, min(size, first + _RULES_PER_CHAIN))
        rules = tuple(
            (Match("meta mark", (f"{number + 1:#x}",)), Match("ip daddr", (_address(number),)), Verdict("accept")) for number in numbers
        )
        objects.append(NftChain(_TABLE, f"c{first}", rules))
    return HostPlan(Name("rome"), Name("bench"), {_UNIT: SummedUnit.of(Entry(item, ()) for item in objects)})


def summed_up(size: int, samples: Samples, resident: Details) -> list[Result]:
    floor, peer = median(samples["floor"]), median(samples["peer"])
    full = min(floor * _GOAL_FLOOR, peer * _GOAL_PEER)
    goals = {"idle": floor * _GOAL_IDLE, "full": full, "anew": full, "one-rule": None}
    details: Details = {f"{what} ms": rounded(median(values)) for what, values in samples.items()} | {"resident MiB": resident}
    return [
        result(f"nft-{what}-{size}", samples[what], "ms", floor=floor, peer=peer, goal=goal and rounded(goal), details=details)
        for what, goal in goals.items()
    ]


class _Auditor:
    """What the auditor does in its kernel's thread, for one layer."""

    def __init__(self, kernel: LinuxKernel, wanted: HostPlan) -> None:
        self._kernel = kernel
        self._unchanged = Unchanged(kernel)
        self._plan = wanted

    def look(self) -> list[Finding] | None:
        """Findings; None when there was no need to look."""
        if not self._unchanged.left(("nft",), self._plan, ()):
            return None
        objects = self._plan.objects()
        marker = self._kernel.marker()
        view = View(self._kernel.reference(objects), self._kernel.read(objects, {"nft"}), marker, {})
        states = self._unchanged.states(("nft",), self._plan, (), marker)
        found = compare(view, self._plan, {"nft"})
        self._unchanged.note(states, {item.layer for item in found})
        return found

    def need(self, keys: list[str] | None) -> None:
        """Look, and find exactly this."""
        found = self.look()
        if (None if found is None else [item.key for item in found]) != keys:
            msg = f"the auditor was to find {keys}"
            raise Permanent(msg)


def _measure(size: int, rounds: int) -> tuple[Samples, Details]:
    wanted = plan(size)
    samples: dict[str, list[float]] = {}

    def note(what: str, work: Callable[[], object]) -> None:
        samples.setdefault(what, []).append(spent_ms(work))

    bare = BareNetlink(NETLINK_NETFILTER)
    with TemporaryDirectory(prefix="meshmark-bench-") as folder:
        kernel = LinuxKernel(Path(folder), remembers=True)
        marker = Marker(1, 1, {unit_tag(_UNIT): wanted.digests()[_UNIT]})
        kernel.commit([Change(None, item) for item in wanted.objects().values()], marker)
        auditor = _Auditor(kernel, wanted)
        first = wanted.objects()[f"chain {_TABLE} c0"]
        resident = added_mib(lambda: auditor.need([]))
        forgetful = LinuxKernel(Path(folder))
        newcomer = _Auditor(forgetful, wanted)
        newcomer.need([])
        for _ in range(rounds):
            note("floor", lambda: _dump(bare))
            _nft("add table inet other; delete table inet other")
            note("full", lambda: auditor.need([]))
            note("anew", lambda: newcomer.need([]))
            for _ in range(_IDLE_PER_ROUND):
                note("idle", lambda: auditor.need(None))
            _nft(f"add rule inet {_TABLE} c0 counter")
            note("one-rule", lambda: auditor.need([f"chain {_TABLE} c0"]))
            note("peer", _list)
            kernel.commit([Change(first, first)], marker)
            auditor.need([])
        forgetful.close()
        kernel.close()
    bare.close()
    return samples, resident


def added_mib(work: Callable[[], object]) -> Details:
    """What work adds to this process, and the most that it takes meanwhile, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the most begins anew
    before = _status_mib("VmRSS")
    work()
    gc.collect()
    return {"added": rounded(_status_mib("VmRSS") - before), "at most": rounded(_status_mib("VmHWM") - before)}


def _status_mib(what: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024


def _dump(bare: BareNetlink) -> None:
    bare.dump(_GET_RULE, _IN_TABLE)
    bare.dump(_GET_ELEMENTS, _IN_TABLE + text_attribute(2, _MAP))


def _address(number: int) -> str:
    return f"10.{100 + (number >> 16)}.{number >> 8 & 0xFF}.{number & 0xFF}"


def _nft(command: str) -> None:
    subprocess.run(["nft", command], check=True)


def _list() -> None:
    subprocess.run(["nft", "-j", "list", "table", "inet", _TABLE], stdout=subprocess.DEVNULL, check=True)


FIGURE = Figure("nft-reading", "own nftables read and compared, beside the kernel's own dump and `nft -j`", run, needs_root=True)
