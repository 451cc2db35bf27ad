"""Reading own tables by the kernel's messages: what is read is what libnftables lists, whoever changes what, and little is read anew."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from schemas.host_objects import NftSet, PlanObject
from services.kernel.nft.engine import LibNftables
from services.kernel.nftread import reading, words
from services.kernel.nftread.dumps import Dumps
from services.kernel.nftread.reading import Reading
from services.kernel.transaction import Held, Listed, ListedChain
from tests.contract.kernel.machines import LinuxMachine, converge

pytestmark = pytest.mark.privileged


class Reader(NamedTuple):
    """A remembering reader in the machine's namespace, and what lists the same by libnftables. `made` are the sets that were not known."""

    machine: LinuxMachine
    library: LibNftables
    reading: Reading
    dumps: Dumps
    made: list[str]

    def read(self, plan: dict[str, PlanObject]) -> dict[str, Held]:
        """Read, having forgotten what was made before; what is read is what there is."""
        self.made.clear()
        found = self.machine._thread.submit(self.reading.read, plan).result(30)
        listed = self.machine._thread.submit(self.library.read_all, plan).result(30)
        assert comparable(found) == comparable(listed)
        return found


def comparable(found: Mapping[str, Held]) -> dict[str, object]:
    """Objects without the words for what no plan can have, and chains without the form of their rules."""
    return {key: _bare(item) for key, item in found.items()}


def _bare(item: Held) -> object:
    if isinstance(item, ListedChain):
        return item.table, item.name, len(item.rules), item.type, item.hook, item.priority, item.policy
    is_odd = isinstance(item, Listed) or (isinstance(item, NftSet) and " . " in item.key_type)
    return item.key if is_odd else item


@pytest.fixture
def reader(machine: LinuxMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    made: list[str] = []
    make_elements = reading.sets.held_elements

    def held_elements(table: str, head: reading.Head, *more: object) -> object:
        made.append(head.name)
        return make_elements(table, head, *more)  # type: ignore[arg-type]

    def make() -> Reader:
        dumps = Dumps()
        return Reader(machine, LibNftables(), Reading(dumps, remembers=True), dumps, made)

    monkeypatch.setattr(reading.sets, "held_elements", held_elements)
    found = machine._thread.submit(make).result(10)
    yield found
    found.dumps.close()
    machine._thread.submit(found.library.close).result(10)


def test_what_is_unchanged_is_the_same_object(reader: Reader, plan: dict[str, PlanObject]) -> None:
    """Nothing is made anew while nobody writes, whatever is counted meanwhile, and nothing of ours when somebody writes elsewhere."""
    assert reader.read(plan) == {}
    converge(reader.machine.kernel, plan)
    found = reader.read(plan)
    assert reader.made != []
    for command in ("true", "nft add table inet other; nft add chain inet other c; nft add rule inet other c counter"):
        reader.machine.run(command)
        again = reader.read(plan)
        assert reader.made == []
        assert all(again[key] is found[key] for key in found if not key.startswith(("table ", "set ")))


def test_a_plan_s_own_objects_stand_for_those_that_are_read(reader: Reader, plan: dict[str, PlanObject]) -> None:
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
CHANGES: dict[str, tuple[str, list[str]]] = {
    "a rule more": ("add rule inet meshmark.r b drop", []),
    "a rule in an empty chain": ("add rule inet meshmark.r c drop", []),
    "all rules of a chain away": ("flush chain inet meshmark.r a", []),
    "other rules": ("flush chain inet meshmark.r a; add rule inet meshmark.r a ip saddr @s counter accept", []),
    "an element more": ("add element inet meshmark.r s { 10.5.0.0/16 }", ["s"]),
    "an element away": ("delete element inet meshmark.r s { 10.3.0.0/16 }", ["s"]),
    "another value": ("delete element inet meshmark.r m { 10.1.0.1 }; add element inet meshmark.r m { 10.1.0.1 : 0x2 }", ["m"]),
    "a set more": ("add set inet meshmark.r t { type inet_service; }", ["t"]),
    "an odd set": ("add set inet meshmark.r t { type ipv4_addr; flags timeout; timeout 9s; }", []),
    "a set of what no plan knows": ("add set inet meshmark.r t { type ether_addr . inet_service; }", ["t"]),
    "a map away": ("delete map inet meshmark.r empty", []),
    "a chain more": ("add chain inet meshmark.r d { type filter hook input priority 0; policy drop; }", []),
    "a chain away": ("delete chain inet meshmark.r c", []),
    "another policy": ("add chain inet meshmark.r a { policy drop; }", []),
    "a counter by name": ("add counter inet meshmark.r n", []),
    "a table more": ("add table inet meshmark.q { chain x { }; }", []),
    "the table away": ("delete table inet meshmark.r", []),
    "a dormant table": ("add table inet meshmark.r { flags dormant; }", []),
    "the table anew": (f"delete table inet meshmark.r; {BASE}", []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_little_more_is_made(reader: Reader, name: str) -> None:
    """Whatever somebody does to a table of ours; and what is put back is seen, too."""
    command, made = CHANGES[name]
    reader.machine.run(f"nft -f - <<'END'\n{BASE}\nEND")
    before = reader.read({})
    reader.machine.run(f"nft -f - <<'END'\n{command}\nEND".replace("; table", "\ntable"))
    after = reader.read({})
    assert reader.made == made
    assert (before == after) == (name == "the table anew")
    reader.machine.run(f"nft -f - <<'END'\nadd table inet meshmark.r\ndelete table inet meshmark.r\n{BASE}\nEND")
    again = reader.read({})
    assert {key: item for key, item in again.items() if "meshmark.q" not in key} == before


def test_a_set_without_a_name_is_what_is_in_it(reader: Reader) -> None:
    """Not its number, which the next one with other elements may have, nor the order of its elements."""
    chain = "chain meshmark.r a"
    reader.machine.run(f"nft -f - <<'END'\n{BASE}\nEND")
    before = reader.read({})[chain]
    rules = "flush chain inet meshmark.r a; add rule inet meshmark.r a ip saddr @s counter accept; add rule inet meshmark.r a tcp dport"
    reader.machine.run(f"nft '{rules} {{ 80, 444 }} counter drop'")
    assert reader.read({})[chain] != before
    reader.machine.run(f"nft '{rules} {{ 443, 80 }} counter drop'")
    assert reader.read({})[chain] == before


def test_what_plans_do_not_have_is_put_into_words(reader: Reader) -> None:
    """By its name where there are no others; it is a difference, and no error."""
    rules = (
        "ether saddr 02:00:00:00:00:01 accept",
        "numgen inc mod 2 0 drop",
        "meta skuid 0 counter",
        "tcp dport vmap { 22 : accept, 80 : drop }",
        "ip saddr . tcp dport { 10.0.0.1 . 22 } accept",
        "limit rate over 10 kbytes/hour drop",
        "quota over 10 mbytes drop",
        "meta l4proto tcp dnat ip to 10.0.0.1-10.0.0.9:80-90",
        "iif lo accept",
        "ip dscp cs1 accept",
    )
    chain = "add chain inet meshmark.r x { type nat hook prerouting priority 0; }"
    text = "\n".join(["add table inet meshmark.r", chain, *(f"add rule inet meshmark.r x {rule}" for rule in rules)])
    reader.machine.run(f"nft -f - <<'END'\n{text}\nEND")
    found = reader.read({})["chain meshmark.r x"]
    assert isinstance(found, ListedChain)
    said = list(map(words.rule_text, found.rules))
    assert len(set(said)) == len(rules)
    assert said[1].startswith("[numgen 0x")
    assert said[3] == "meta l4proto tcp tcp dport vmap { 22 : accept, 80 : drop }"
    assert said[7].endswith("meta l4proto tcp dnat ip to 10.0.0.1-10.0.0.9:80-90")


def test_counted_packets_are_no_change(reader: Reader) -> None:
    """What a counter has counted is in no form of a rule."""
    reader.machine.run(f"nft -f - <<'END'\n{BASE}\nEND")
    reader.machine.run("nft add chain inet meshmark.r o '{ type filter hook output priority 0; }'; nft add rule inet meshmark.r o counter")
    before = reader.read({})
    reader.machine._thread.submit(send_a_packet).result(5)
    reader.machine.run("nft add table inet other")
    assert "packets 0" not in reader.machine.run("nft list chain inet meshmark.r o")
    assert reader.read({}) == before


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
