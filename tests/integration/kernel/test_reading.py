"""Reading own tables again: what is remembered of a real kernel is what it lists, whoever changes what, and little is listed anew."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from schemas.host_objects import PlanObject
from services.kernel.nft.engine import LibNftables
from services.kernel.nft.raw import PartKey, RawTables
from services.kernel.nft.reading import Reading
from services.kernel.transaction import Held
from tests.contract.kernel.machines import LinuxMachine, converge

pytestmark = pytest.mark.privileged


class Spy:
    """An engine that notes what is listed."""

    def __init__(self, engine: LibNftables) -> None:
        self.engine = engine
        self.listed: list[object] = []

    def tables(self) -> list[str]:
        return self.engine.tables()

    def read(self, table: str, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        self.listed.append(table)
        return self.engine.read(table, wanted)

    def read_part(self, table: str, part: PartKey, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        self.listed.append(part)
        return self.engine.read_part(table, part, wanted)


class Reader(NamedTuple):
    """A remembering reader in the machine's namespace."""

    machine: LinuxMachine
    spy: Spy
    reading: Reading
    raw: RawTables

    def read(self, plan: dict[str, PlanObject]) -> dict[str, Held]:
        """Read, having forgotten what was listed before; what is read is what there is."""
        self.spy.listed.clear()
        found = self.machine._thread.submit(self.reading.read, plan).result(30)
        assert found == self.machine._thread.submit(self._listed, plan).result(30)
        return found

    def _listed(self, plan: dict[str, PlanObject]) -> dict[str, Held]:
        engine = self.spy.engine
        return {key: item for table in engine.tables() for key, item in engine.read(table, plan).items()}


@pytest.fixture
def reader(machine: LinuxMachine) -> Iterator[Reader]:
    def make() -> Reader:
        spy, raw = Spy(LibNftables()), RawTables()
        return Reader(machine, spy, Reading(spy, raw), raw)

    made = machine._thread.submit(make).result(10)
    yield made
    made.raw.close()
    machine._thread.submit(made.spy.engine.close).result(10)


def test_what_is_unchanged_is_not_listed(reader: Reader, plan: dict[str, PlanObject]) -> None:
    """Nothing at all while nobody writes, whatever is counted meanwhile, and nothing of ours when somebody writes elsewhere."""
    assert reader.read(plan) == {}
    converge(reader.machine.kernel, plan)
    found = reader.read(plan)
    assert reader.spy.listed != []
    assert reader.read(plan) == found
    assert reader.spy.listed == []
    reader.machine.run("nft add table inet other; nft add chain inet other c; nft add rule inet other c counter")
    assert reader.read(plan) == found
    assert reader.spy.listed == []


def test_a_plan_s_own_objects_stand_for_those_that_are_listed(reader: Reader, plan: dict[str, PlanObject]) -> None:
    """So that a large set is in memory once."""
    converge(reader.machine.kernel, plan)
    found = reader.read(plan)
    elements = [key for key in found if key.startswith("element ")]
    assert elements
    assert all(found[key] is plan[key] for key in elements if found[key] == plan[key])


BASE = """
table inet meshmark.r {
    set s { type ipv4_addr; flags interval; elements = { 10.1.0.0/16, 10.3.0.0/16 } }
    map m { type ipv4_addr : mark; elements = { 10.1.0.1 : 0x1 } }
    map empty { type ipv4_addr : ipv4_addr; }
    chain a { type filter hook forward priority 10; ip saddr @s counter accept; tcp dport { 80, 443 } counter drop; }
    chain b { ip daddr @s meta mark set ip daddr map @m; comment "x"; counter accept; }
    chain c { }
}
"""
CHANGES: dict[str, tuple[str, list[object]]] = {
    "a rule more": ("add rule inet meshmark.r b drop", [("chain", "b")]),
    "a rule in an empty chain": ("add rule inet meshmark.r c drop", [("chain", "c")]),
    "all rules of a chain away": ("flush chain inet meshmark.r a", [("chain", "a")]),
    "other rules": ("flush chain inet meshmark.r a; add rule inet meshmark.r a ip saddr @s counter accept", [("chain", "a")]),
    "an element more": ("add element inet meshmark.r s { 10.5.0.0/16 }", [("set", "s")]),
    "an element away": ("delete element inet meshmark.r s { 10.3.0.0/16 }", [("set", "s")]),
    "another value": (
        "delete element inet meshmark.r m { 10.1.0.1 }; add element inet meshmark.r m { 10.1.0.1 : 0x2 }",
        [("map", "m")],
    ),
    "a set more": ("add set inet meshmark.r t { type inet_service; }", [("set", "t")]),
    "an odd set": ("add set inet meshmark.r t { type ipv4_addr; flags timeout; }", [("set", "t")]),
    "a map away": ("delete map inet meshmark.r empty", []),
    "a chain more": ("add chain inet meshmark.r d { type filter hook input priority 0; policy drop; }", [("chain", "d")]),
    "a chain away": ("delete chain inet meshmark.r c", []),
    "another policy": ("add chain inet meshmark.r a { policy drop; }", [("chain", "a")]),
    "a counter by name": ("add counter inet meshmark.r n", ["meshmark.r"]),
    "a table more": ("add table inet meshmark.q { chain x { }; }", ["meshmark.q"]),
    "the table away": ("delete table inet meshmark.r", []),
    "a dormant table": ("add table inet meshmark.r { flags dormant; }", ["meshmark.r"]),
    "the table anew": (f"delete table inet meshmark.r; {BASE}", ["meshmark.r"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_little_more_is_listed(reader: Reader, name: str) -> None:
    """Whatever somebody does to a table of ours; and what is put back is seen, too."""
    command, listed = CHANGES[name]
    reader.machine.run(f"nft -f - <<'END'\n{BASE}\nEND")
    before = reader.read({})
    reader.machine.run(f"nft -f - <<'END'\n{command}\nEND".replace("; table", "\ntable"))
    after = reader.read({})
    assert reader.spy.listed == listed
    assert (before == after) == (name == "the table anew")
    reader.machine.run(f"nft -f - <<'END'\nadd table inet meshmark.r\ndelete table inet meshmark.r\n{BASE}\nEND")
    reader.read({})


def test_counted_packets_are_no_change(reader: Reader) -> None:
    """What a counter has counted is in no listing, so it is no reason to list."""
    reader.machine.run(f"nft -f - <<'END'\n{BASE}\nEND")
    reader.machine.run("nft add chain inet meshmark.r o '{ type filter hook output priority 0; }'; nft add rule inet meshmark.r o counter")
    reader.read({})
    reader.machine._thread.submit(send_a_packet).result(5)
    reader.machine.run("nft add table inet other")
    assert "packets 0" not in reader.machine.run("nft list chain inet meshmark.r o")
    reader.read({})
    assert reader.spy.listed == []


def send_a_packet() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("127.0.0.1", 9))


def test_a_writer_who_never_pauses_hides_nothing(reader: Reader) -> None:
    """What is read while somebody else writes all the time is what there is, though little can be remembered."""
    reader.machine.run(f"nft -f - <<'END'\n{BASE}\nEND")
    before = reader.read({})
    loop = "while :; do nft add table inet other; nft delete table inet other; done"
    writer = subprocess.Popen(["ip", "netns", "exec", reader.machine.namespace, "sh", "-c", loop])
    try:
        for _ in range(20):
            assert reader.read({}) == before
        reader.machine.run("nft add rule inet meshmark.r c drop")
        assert reader.read({}) != before
    finally:
        writer.kill()
        writer.wait()
