"""What the audit of encryption costs a packet on a node, and how soon a packet in clear is an alert.

The first node of examples/encryption.yaml, as network namespaces that differ only in their rules: all of them (`whole`), those without the
chains that look for packets in clear (`unwatched`), and those without anything that counts either (`uncounted`). Its device is a link that
counts a packet and drops it, so that WireGuard's own work is left out: it would be many times what is to be measured. One round sends a
slice of packets through each, in random order; the kernel does all the forwarding within the sending thread's writes, and the clock is
that thread's processor time. The figure is what `whole` takes more than `uncounted` in the same round.

For the alert, packets to pods that nobody spoke to before leave by the uplink in clear, one at a time, and are timed up to the moment at
which the event is handed to who publishes it. A third of a second of that is by design.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog
from msgspec.structs import replace

from benchmarks import lab
from benchmarks.datagrams import datagram
from benchmarks.gateways import tun
from benchmarks.interval import interval
from benchmarks.result import Figure, Result, median, result, rounded
from benchmarks.rounds import Round, interleaved
from schemas.drift import DriftEvent
from schemas.encryption import point_of
from schemas.host_objects import NftChain, NftElement, NftObject, NftSet, PlanObject
from schemas.nft import Comment, Counter, Match, Rule, SetMark
from schemas.plan import HostPlan, unit_tag
from schemas.values import Prefix
from services.auditor.plaintext import GRACE_S, HOLD_S
from services.auditor.plaintext_watch import PlaintextWatch
from services.cli.files import load
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX
from services.cli.plan import paper_plans
from services.kernel.linux import LinuxKernel
from services.kernel.nft.text import table_text
from services.kernel.transaction import Marker, changes
from services.planner.state import HostId
from services.runtime.errors import Transient
from services.runtime.health import Readiness
from services.runtime.metrics import Metrics
from services.runtime.plans import Update
from services.runtime.service import Context
from services.runtime.settings import Settings

T = TypeVar("T")

WHOLE, UNWATCHED, UNCOUNTED = _VARIANTS = ("whole", "unwatched", "uncounted")
_EXAMPLES = Path(__file__).parents[2] / "examples"
_HOST = HostId("rome", "worker-1")
_ROUNDS, _SLICE, _BATCH = 60, 1000, 5
_PODS, _DEVICE, _UPLINK = "cni", "me.0", "eth0"
POD = "10.200.1.10"
WAYS = {"encrypted": "10.200.2.10", "outside": "192.0.2.10"}
PORTS, PAYLOAD = (40_000, 5001), bytes(18)
_ALERTS = 20
_ALERT_MAX_S = 10.0


def run(say: Callable[[str], None]) -> list[Result]:
    whole = plan()
    with lab.claimed():
        with standing(whole) as made:
            say(f"{len(made)} nodes stand")
            found = [_cost(name, _measured(made, to)) for name, to in WAYS.items()]
        say(f"alerts are told {GRACE_S:g} s after the first plan")
        return [*found, _alerts(whole)]


def plan() -> HostPlan:
    """The plan of the first node of examples/encryption.yaml."""
    return paper_plans(load([_EXAMPLES / "encryption.yaml", _EXAMPLES / "encryption-keys.yaml"]))[_HOST]


# What a packet costs ----------------------------------------------------------------------------------------------------------------------


def variants(plan: HostPlan) -> dict[str, dict[str, PlanObject]]:
    """The nftables objects of each variant by key."""
    whole: dict[str, PlanObject] = {key: item for key, item in plan.objects().items() if isinstance(item, NftObject)}
    unwatched: dict[str, PlanObject] = {key: item for key, item in whole.items() if not _watches(item)}
    uncounted: dict[str, PlanObject] = {
        key: _without_counts(item) if isinstance(item, NftChain) else item for key, item in unwatched.items()
    }
    return {WHOLE: whole, UNWATCHED: unwatched, UNCOUNTED: uncounted}


def _watches(item: PlanObject) -> bool:
    """Whether an object is there for packets in clear."""
    name = item.name if isinstance(item, NftChain | NftSet) else item.set if isinstance(item, NftElement) else ""
    return name.startswith(("strict_", "clear_")) or name in ("enc", "enc6")


def _without_counts(chain: NftChain) -> NftChain:
    """A chain without what is there to count: rules that do nothing else go as a whole."""
    rules: list[Rule] = []
    for rule in chain.rules:
        counts = any(isinstance(item, Comment) and point_of(item.text) for item in rule)
        left = tuple(item for item in rule if not isinstance(item, Counter | Comment)) if counts else rule
        if not counts or any(not isinstance(item, Match) for item in left):
            rules.append(left)
    return replace(chain, rules=tuple(rules))


@contextmanager
def standing(plan: HostPlan) -> Iterator[dict[str, int]]:
    """Where pods' packets are written, for each variant."""
    with ExitStack() as stack:
        made = {}
        for name, objects in variants(plan).items():
            namespace = f"{PREFIX}{name}"
            made[name] = node(namespace, stack)
            namespaces.load_nft(namespace, table_text(objects))
        yield made


def node(namespace: str, stack: ExitStack) -> int:
    """A node's links and what leads packets into its device, without nftables."""
    namespaces.script([f"netns add {namespace}"])
    namespaces.set_sysctls(namespace, (("ipv6/conf/all/disable_ipv6", "1"), ("ipv4/ip_forward", "1"), ("ipv4/conf/all/rp_filter", "0")))
    inlet = namespaces.inside(namespace, lambda: tun(_PODS))
    stack.callback(os.close, inlet)
    lines = ["link set lo up", f"link set {_PODS} up", f"route add 10.200.1.0/24 dev {_PODS}"]
    for link in (_DEVICE, _UPLINK):
        lines += [f"link add {link} txqueuelen 0 type ifb", f"link set {link} up"]
    lines += [f"route add default dev {_UPLINK}", f"route add default dev {_DEVICE} table 10"]
    namespaces.script([*lines, "rule add priority 1000 fwmark 0x4d2/0xfff lookup 10"], namespace)
    return inlet


def _measured(made: Mapping[str, int], to: str) -> list[Round]:
    """Rounds of nanoseconds per packet, after one slice through each that is not counted."""
    packet = datagram(POD, to, PORTS, PAYLOAD)
    for inlet in made.values():
        ns_per_packet(inlet, packet)
    return interleaved(made, _ROUNDS, lambda name: ns_per_packet(made[name], packet))


def ns_per_packet(inlet: int, packet: bytes) -> float:
    """The median over short batches, so that one that the machine was taken away from does not count."""
    took = []
    for _ in range(_SLICE // _BATCH):
        began = time.thread_time_ns()
        for _ in range(_BATCH):
            os.write(inlet, packet)
        took.append((time.thread_time_ns() - began) / _BATCH)
    return median(took)


def _cost(name: str, rounds: Sequence[Round]) -> Result:
    def added(part: Sequence[Round], more: str, less: str) -> float:
        return median(each[more] - each[less] for each in part)

    details: dict[str, object] = {"ns per packet": {variant: rounded(median(part[variant] for part in rounds)) for variant in _VARIANTS}}
    for words, more, less in (
        ("all of it adds ns", WHOLE, UNCOUNTED),
        ("looking for packets in clear adds ns", WHOLE, UNWATCHED),
        ("counters add ns", UNWATCHED, UNCOUNTED),
    ):
        found = interval(rounds, lambda part, more=more, less=less: added(part, more, less))  # type: ignore[misc]
        details[words] = {"median": found.value, "from": found.low, "to": found.high}
    return result(f"encryption-audit-{name}", [part[WHOLE] - part[UNCOUNTED] for part in rounds], "ns", details=details)


# How soon a packet is an alert ------------------------------------------------------------------------------------------------------------


def _alerts(plan: HostPlan) -> Result:
    namespace = f"{PREFIX}leaking"
    with ExitStack() as stack:
        inlet = node(namespace, stack)
        took = namespaces.inside(namespace, lambda: asyncio.run(_time_alerts(plan, inlet)))
    return result("encryption-leak-to-alert", took, "s", floor=HOLD_S, goal=1.0)


async def _time_alerts(plan: HostPlan, inlet: int) -> list[float]:
    """Seconds from each leaked packet to its alert."""
    kernel = LinuxKernel(None)
    objects = {key: item for key, item in plan.objects().items() if isinstance(item, NftObject)}
    # What marks packets is left out, so that all of them leave in clear.
    leaking = {key: replace(item, rules=_unmarked(item)) if isinstance(item, NftChain) else item for key, item in objects.items()}
    kernel.commit(changes({}, leaking), Marker(1, 1, {unit_tag(name): digest for name, digest in plan.digests().items()}))
    told: asyncio.Queue[tuple[float, DriftEvent]] = asyncio.Queue()

    def tell(events: list[DriftEvent]) -> None:
        for event in events:
            told.put_nowait((time.perf_counter(), event))

    async def at_once(work: Callable[[], T], /) -> T:
        return work()

    broker: Any = None  # nothing is published from here
    settings = Settings(cluster=_HOST.cluster, host=_HOST.name)
    context = Context(settings, broker, Metrics(), Readiness("auditor"), asyncio.Event(), structlog.get_logger())
    watch = PlaintextWatch(context, kernel, at_once, tell)
    watch.follow(Update(plan, 1, 1))
    task = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(GRACE_S + 1)
        return [await _time_alert(told, inlet, number) for number in range(_ALERTS)]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        kernel.close()


async def _time_alert(told: asyncio.Queue[tuple[float, DriftEvent]], inlet: int, number: int) -> float:
    to = Prefix("10.200.2.0/24").address(100 + number)
    sent = time.perf_counter()
    os.write(inlet, datagram(POD, to, PORTS, PAYLOAD))
    try:
        async with asyncio.timeout(_ALERT_MAX_S):
            while True:
                at, event = await told.get()
                if event.state == "raised" and event.packet is not None and event.packet.destination == to:
                    return at - sent
    except TimeoutError:
        msg = f"no alert of the packet to {to} within {_ALERT_MAX_S:g} s"
        raise Transient(msg) from None


def _unmarked(chain: NftChain) -> tuple[Rule, ...]:
    return tuple(rule for rule in chain.rules if not (chain.name == "steer" and any(isinstance(item, SetMark) for item in rule)))


FIGURE = Figure("encryption-audit", "ns that the audit of encryption adds to a packet; time to an alert", run, needs_root=True)
