"""What a look makes of what was seen: each number once, the same for the same users, and never more than a report can carry."""

from __future__ import annotations

from pathlib import Path

from schemas import codec
from schemas.in_use import BY_CHARACTERS, USES_MAX, Use
from services.kernel.survey.in_use import summary
from services.kernel.survey.ports import listening
from services.kernel.survey.values import ForeignRule, LinkSeen, MarkUse

REPORT_BYTES = 128 * 1024


def test_each_number_is_said_once_with_the_first_who_has_it() -> None:
    """Routes before rules; main and local are everybody's; a rule's mark is a use as well."""
    rules = [ForeignRule(4, 100, 300, 1, 0xF), ForeignRule(4, 100, 254), ForeignRule(6, 100, 300), ForeignRule(4, 101, 0)]
    marks = [MarkUse("ip a b", "sets", 0x4000, 0x4000), MarkUse("ip a c", "matches", 0x4000, 0x4000)]
    links = [LinkSeen("flannel.1", "vxlan", is_own=False, port=8472), LinkSeen("mo.x", "vxlan", is_own=True, port=4789)]
    found = summary(rules, [(4, 300), (6, 77)], marks, [8472, 53], links)
    assert found.marks == (Use(0xF, rules[0].text), Use(0x4000, "ip a b sets 0x4000"))
    assert found.tables == (Use(77, "IPv6 routes", 6), Use(300, "IPv4 routes", 4), Use(300, rules[2].text, 6))
    assert found.priorities == (Use(100, rules[0].text, 4), Use(100, rules[2].text, 6), Use(101, rules[3].text, 4))
    assert found.ports == (Use(53, "a UDP socket"), Use(8472, "vxlan device flannel.1"))


def test_a_host_full_of_others_still_fits_into_a_report() -> None:
    """Thousands of rules, marks, tables and sockets with long names: cut, and the same every time."""
    rules = [ForeignRule(4, 1000 + number, 1000 + number, number + 1, 0xFFFFFFFF) for number in range(5000)]
    marks = [MarkUse("ip " + "x" * 500, "sets", number + 1) for number in range(5000)]
    found = summary(rules, [(4, 10_000 + number) for number in range(5000)], marks, range(1, 5000), [])
    assert all(len(uses) == USES_MAX for uses in (found.marks, found.tables, found.priorities, found.ports))
    assert all(len(use.by) <= BY_CHARACTERS for use in found.marks)
    assert len(codec.encode(found)) < REPORT_BYTES
    assert found.ports[0].number == 1


def test_sockets_that_talk_to_one_peer_only_are_none_that_listen(tmp_path: Path) -> None:
    """A resolver's question is bound to its server, of either family."""
    net = tmp_path / "thread-self/net"
    net.mkdir(parents=True)
    header = "  sl  local_address rem_address   st ...\n"
    tail = "07 00000000:00000000 00:00000000 00000000     0        0"
    (net / "udp").write_text(
        header + f"   1: 00000000:0035 00000000:0000 {tail} 11 2 f 0\n" + f"   2: 0100007F:C001 0100007F:0035 {tail} 12 2 f 0\n"
    )
    (net / "udp6").write_text(header + f"   3: {'0' * 32}:CA80 {'0' * 32}:0000 {tail} 13 2 f 0\n")
    assert listening(tmp_path) == {"11": 53, "13": 51840}
