"""What a host's nftables transaction costs from plan objects to the kernel: whole tables, one element, one rule, one chain.

Floor: the kernel's own time, one send of the same transaction encoded beforehand. Peer: ``nft -f`` of the same as text, which is written
beforehand too. The engine over libnftables, from objects as well, is in the details. All take turns in one network namespace of their
own, with whose end everything is gone; what is taken back between two samples is not counted.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from benchmarks.result import Figure, Result, median, ratio, result, rounded
from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.nft import Comment, Counter, Match, Rule, SetMark, Verdict
from services.kernel.namespace import enter_new_network
from services.kernel.netlink import HEADER, NETLINK_NETFILTER, REPLACE, NetlinkSocket, attributes
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.batch import Batch
from services.kernel.nfnetlink.elements import Header
from services.kernel.nfnetlink.engine import Nfnetlink
from services.kernel.nfnetlink.exchange import FIRST
from services.kernel.nfnetlink.rules import Encoders
from services.kernel.nfnetlink.values import IPV4_ADDRESS
from services.kernel.nft.engine import LibNftables
from services.kernel.nft.steps import Step, steps
from services.kernel.nft.text import Context, batch_text
from services.kernel.transaction import Change, Marker, changes

_TABLE = "meshmark.bench"
_MARKER = Marker(1, 1, {"unit": "digest"})
_SIZES = ((10_000, 7), (50_000, 5))
"""Rules of a whole table, and how often it is made."""
_PRESENT = ((100, 30, 5), (10_000, 30, 3), (50_000, 30, 3))
"""Elements that are there when one comes, and how often one comes: by the quick ways and by those that read everything first."""
_CHAIN = 1000
_CHAINS, _CHAIN_RULES = 100, 100
_FAMILY_BYTES = 4
_ELEMENT_GOAL_MS = 0.4
_OVER_KERNEL, _OVER_NFT = 1.3, 0.6
_MANY, _UNDER_BOTH = 50_000, 1000
"""Elements beside which one is to be so many times faster than by nft and by libnftables."""

Objects = dict[str, PlanObject]
T = TypeVar("T")


class Took(NamedTuple):
    """Milliseconds by the clock, and of the processor: what a busy machine changes less."""

    wall_ms: float
    processor_ms: float


Samples = dict[str, list[Took]]


def wall_ms(samples: Samples, way: str) -> float:
    return median(took.wall_ms for took in samples[way])


def timed(work: Callable[[], object]) -> Took:
    """What this thread and its children took."""
    began, used = time.perf_counter(), _used_s()
    work()
    return Took((time.perf_counter() - began) * 1e3, (_used_s() - used) * 1e3)


def _used_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


class Kernel:
    """A network namespace with both engines and a bare socket. To be made and used in one thread that is in the namespace."""

    def __init__(self) -> None:
        self.native = Nfnetlink()
        self.library = LibNftables()
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._socket.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_SNDBUFFORCE", 32), 1 << 27)

    def by_engine(self, batch: Sequence[Change]) -> Took:
        return timed(lambda: self.native.commit(batch, _MARKER))

    def by_library(self, batch: Sequence[Change]) -> Took:
        return timed(lambda: self.library.commit(batch, _MARKER))

    def by_nft(self, text: str) -> Took:
        return timed(lambda: subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True, capture_output=True))

    def by_kernel(self, data: bytes) -> Took:
        """The send alone: when it returns, the transaction is made or refused."""
        took = timed(lambda: self._socket.send(data))
        try:
            refused = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return took
        msg = f"the kernel refused the encoded batch: {refused[:64].hex()}"
        raise OSError(msg)

    def handles(self, chain: str) -> list[int]:
        """Those of a chain's rules."""
        with contextlib.closing(NetlinkSocket(NETLINK_NETFILTER)) as asked:
            where = wire.text(wire.RULE_TABLE, _TABLE) + wire.text(wire.RULE_CHAIN, chain)
            bodies = asked.dump(wire.SUBSYSTEM | wire.Message.GET_RULE, bytes((wire.FAMILY_INET, 0, 0, 0)) + where)
        return [int.from_bytes(attributes(body, 4)[wire.RULE_HANDLE]) for body in bodies]

    def take_back(self, batch: Sequence[Change]) -> None:
        """Make room for the next sample, whoever made the last one: the engine takes it for a stranger's until it has looked."""
        self.native.looking()
        self.native.commit(batch, _MARKER)

    def close(self) -> None:
        self.native.close()
        self.library.close()
        self._socket.close()


def run(say: Callable[[str], None]) -> list[Result]:
    found: list[Result] = []
    with ThreadPoolExecutor(1, initializer=enter_new_network) as thread:
        kernel = thread.submit(Kernel).result()
        gc.collect()
        gc.freeze()  # a service that has run for a while has its objects in the oldest generation as well
        for size, rounds in _SIZES:
            say(f"a table of {size} rules, {rounds} times in each way")
            found.append(thread.submit(_whole_table, kernel, size, rounds).result())
        for size, quick, slow in _PRESENT:
            say(f"one element beside {size} others")
            found += thread.submit(_one_element, kernel, size, quick, slow).result()
        say(f"one rule in a chain of {_CHAIN}")
        found.append(thread.submit(_one_rule, kernel).result())
        say(f"one chain of {_CHAINS} in a table of {_CHAINS * _CHAIN_RULES} rules")
        found.append(thread.submit(_one_chain, kernel).result())
        thread.submit(kernel.close).result()
        gc.unfreeze()
    return found


def _whole_table(kernel: Kernel, size: int, rounds: int) -> Result:
    plan = keyed([NftTable(_TABLE), NftChain(_TABLE, "rules", tuple(map(planned_rule, range(size))), "filter", "forward", 0)])
    batch, away = changes({}, plan), changes(plan, {})
    ways: dict[str, Callable[[], Took]] = {
        "engine": lambda: kernel.by_engine(batch),
        "kernel": _with(kernel.by_kernel, encoded(batch)),
        "nft -f": _with(kernel.by_nft, batch_text(batch, _MARKER)),
        "libnftables": lambda: kernel.by_library(batch),
        "encoding alone": lambda: timed(lambda: encoded(batch)),
    }
    samples = in_turns(ways, rounds, lambda way: None if way == "encoding alone" else kernel.take_back(away))
    floor, peer = wall_ms(samples, "kernel"), wall_ms(samples, "nft -f")
    return summed(f"nft-table-{size}-rules", samples, min(_OVER_KERNEL * floor, _OVER_NFT * peer))


def _one_element(kernel: Kernel, size: int, quick: int, slow: int) -> list[Result]:
    """Into a hash map and into a map of intervals, beside three more sets of intervals."""
    plan = keyed([NftTable(_TABLE), *filled(size)])
    kernel.native.commit(changes({}, plan), _MARKER)
    found = []
    for name, item in {"hash": NftElement(_TABLE, "hosts", "9.9.9.9", "1.1.1.1"), "interval": FREE}.items():
        batch, away = [Change(None, item)], [Change(item, None)]
        header = Header(IPV4_ADDRESS, IPV4_ADDRESS, name == "interval", name == "interval")
        ways: dict[str, Callable[[], Took]] = {
            "engine": _with(kernel.by_engine, batch),
            "kernel": _with(kernel.by_kernel, encoded(batch, header)),
        }

        def back(_: str, away: list[Change] = away) -> None:
            kernel.take_back(away)

        text = batch_text(batch, _MARKER, Context(lambda _table, _set, header=header: header.ranged_data))  # type: ignore[misc]
        reading = {"nft -f": _with(kernel.by_nft, text), "libnftables": _with(kernel.by_library, batch)}
        samples = in_turns(ways | reading, quick, back, dict.fromkeys(reading, quick // slow))
        goal = hash_goal_ms(samples, size) if name == "hash" else _OVER_KERNEL * wall_ms(samples, "kernel")
        found.append(summed(f"nft-{name}-element-{size}", samples, goal))
    kernel.take_back(changes(plan, {}))
    return found


def hash_goal_ms(samples: Samples, size: int) -> float:
    """What one element may take beside `size` others: a time, and with many a part of what the ways take that read all of them."""
    others = ("nft -f", "libnftables") if size == _MANY else ()
    return min([_ELEMENT_GOAL_MS, *(wall_ms(samples, way) / _UNDER_BOTH for way in others)])


def _one_rule(kernel: Kernel) -> Result:
    """A rule in the middle of a chain changes. The floor replaces it by its handle; the other ways write the chain anew."""
    rules = tuple(map(planned_rule, range(_CHAIN)))
    middle = _CHAIN // 2
    chains = [
        NftChain(_TABLE, "rules", (*rules[:middle], planned_rule(number), *rules[middle + 1 :]), "filter", "forward", 0)
        for number in (_CHAIN, _CHAIN + 4)
    ]

    def replaced() -> Took:
        return kernel.by_kernel(replacing(chains[1], middle, kernel.handles("rules")[middle]))

    return _changed(kernel, f"nft-rule-in-{_CHAIN}", [chains[0]], Change(*chains), replaced)


def _one_chain(kernel: Kernel) -> Result:
    """All rules of one chain of many change. Floor: the chain emptied and filled again, encoded beforehand."""
    chains = [_part(number, number) for number in range(_CHAINS)]
    middle = _CHAINS // 2
    return _changed(kernel, f"nft-chain-in-{_CHAINS * _CHAIN_RULES}", chains, Change(chains[middle], _part(middle, _CHAINS)))


def _changed(kernel: Kernel, name: str, chains: Sequence[NftChain], change: Change, floor: Callable[[], Took] | None = None) -> Result:
    """One of these chains changes. The kernel's own way is the chain anew; where there is a `floor`, that stands beside it."""
    plan = keyed([NftTable(_TABLE), *chains])
    kernel.native.commit(changes({}, plan), _MARKER)
    batch, away = [change], [change.inverse()]
    anew = _with(kernel.by_kernel, encoded(batch))
    ways: dict[str, Callable[[], Took]] = {
        "engine": _with(kernel.by_engine, batch),
        **({"kernel": floor, "kernel, chain anew": anew} if floor else {"kernel": anew}),
        "nft -f": _with(kernel.by_nft, batch_text(batch, _MARKER)),
        "libnftables": _with(kernel.by_library, batch),
    }
    samples = in_turns(ways, 15, lambda _: kernel.take_back(away))
    kernel.take_back(changes(plan, {}))
    return summed(name, samples, _OVER_KERNEL * wall_ms(samples, "kernel"))


# What is written -----------------------------------------------------------------------------------------------------------------------


def planned_rule(number: int) -> Rule:
    """One of the forms that plans have, with values of its own."""
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    outgoing = Match("meta mark", ("0x1000",), mask=0x3000)
    return (
        (outgoing, Match("ip daddr", (address,)), Verdict("accept")),
        (Match("iifname", ("mo.*",)), Match("ip saddr", (address,), "!="), Counter(), Verdict("drop")),
        (Match("ip daddr", (f"{address.rpartition('.')[0]}.0/24",)), SetMark(0x1000, 0x3000)),
        (Match("ip saddr", (address,)), Match("tcp dport", (str(number & 0xFFFF),)), Verdict("accept"), Comment(f"rule {number:08}")),
    )[number % 4]


def _part(chain: int, content: int) -> NftChain:
    """One chain of the table of many: each content has rules of its own."""
    first = content * _CHAIN_RULES
    return NftChain(_TABLE, f"part{chain}", tuple(map(planned_rule, range(first, first + _CHAIN_RULES))))


FREE = NftElement(_TABLE, "translated", "200.0.0.0/24", "201.0.0.0/24")


def filled(size: int) -> Iterable[PlanObject]:
    """A hash map and three sets of intervals, `size` elements each, and a map of prefixes with as many."""
    yield NftSet(_TABLE, "hosts", "ipv4_addr", "ipv4_addr")
    yield NftSet(_TABLE, "translated", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True)
    for number in range(size):
        place = f"{number >> 8 & 255}.{number & 255}"
        yield NftElement(_TABLE, "hosts", f"10.{number >> 16}.{place}", "1.1.1.1")
        yield NftElement(_TABLE, "translated", f"{10 + (number >> 16)}.{place}.0/24", f"{100 + (number >> 16)}.{place}.0/24")
    for name in ("local", "remote", "other"):
        yield NftSet(_TABLE, name, "ipv4_addr", interval=True)
        yield from (NftElement(_TABLE, name, f"{10 + (number >> 16)}.{number >> 8 & 255}.{number & 255}.0/24") for number in range(size))


def keyed(items: Iterable[PlanObject]) -> Objects:
    return {item.key: item for item in items}


def encoded(batch: Sequence[Change], header: Header | None = None) -> bytes:
    """A transaction as the kernel gets it."""
    return _whole(Batch(steps(batch, _MARKER), Encoders(), lambda _table, _name: header or Header(IPV4_ADDRESS)).messages)


def replacing(chain: NftChain, place: int, handle: int) -> bytes:
    """A transaction that replaces the rule with this handle by that of a place in a chain."""
    at = chain.table, chain.name
    [rule] = Batch([Step("add", "rules", *at, replace(chain, rules=(chain.rules[place],)))], Encoders(), _no_header).messages
    named = wire.text(wire.RULE_TABLE, chain.table) + wire.text(wire.RULE_CHAIN, chain.name)
    rest = rule[HEADER.size + _FAMILY_BYTES + len(named) :]
    request = wire.request(wire.Message.NEW_RULE, REPLACE, FIRST, named, wire.be64(wire.RULE_HANDLE, handle), rest)
    return _whole([request, *Batch(steps([], _MARKER), Encoders(), _no_header).messages])


def _whole(messages: Sequence[bytes]) -> bytes:
    return b"".join((wire.begin(FIRST - 1, None), *messages, wire.end(FIRST + len(messages))))


def _no_header(_table: str, _name: str) -> Header:
    return Header(IPV4_ADDRESS)


def in_turns(
    ways: dict[str, Callable[[], Took]], rounds: int, back: Callable[[str], object], seldom: Mapping[str, int] = MappingProxyType({})
) -> Samples:
    """What was taken by each way: each once a round, `seldom` ones once in so many, and taken back after it."""
    samples: Samples = {way: [] for way in ways}
    for number in range(rounds):
        for way, work in ways.items():
            if number % seldom.get(way, 1) == 0:
                samples[way].append(work())
                back(way)
    return samples


def _with(work: Callable[[T], Took], value: T) -> Callable[[], Took]:
    return lambda: work(value)


def summed(name: str, samples: Samples, goal: float) -> Result:
    wall = {way: [took.wall_ms for took in found] for way, found in samples.items()}
    processor = {way: rounded(median(took.processor_ms for took in found)) for way, found in samples.items()}
    medians = {way: rounded(median(found)) for way, found in wall.items()}
    details: dict[str, object] = {
        "ms": medians,
        "spread_ms": {way: [rounded(min(found)), rounded(max(found))] for way, found in wall.items()},
        "processor_ms": processor,
        "times_libnftables": ratio(medians["engine"], medians["libnftables"]),
        "processor_times_floor": ratio(processor["engine"], processor["kernel"]),
    }
    return result(name, wall["engine"], "ms", peer=medians["nft -f"], floor=medians["kernel"], goal=rounded(goal), details=details)


FIGURE = Figure("nft-engine", "nftables transactions from objects to the kernel", run, needs_root=True)
