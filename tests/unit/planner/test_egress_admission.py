"""Policies that are refused, and why."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.codec import DecodeError
from schemas.in_use import InUse, Use
from schemas.status import ApplyReport
from schemas.topology import Cluster, EgressPolicy, Gateway, Marks, Node, PublicKey, convert_topology
from schemas.values import Address, Name, Prefix
from services.planner import egress, layout
from services.planner.core import Core, Said
from tests.firewalls import one_chain, rule
from tests.topologies import cluster, gateway, node, peering, said, tell
from tests.unit.planner.policies import items, policy, refused, shop


def test_values_of_marks_are_none_of_the_clusters_own() -> None:
    """Each slot has one, inside the mask; a narrow mask has few, and says so."""
    for marks in (Marks(), Marks(mask=0xF0, encrypt=0x10, encrypted=0x20, decrypted=0x30)):
        values = [egress.mark(marks, slot) for slot in range(egress.room(marks) + 1)]
        assert len(set(values)) == len(values)
        assert not {0, marks.encrypt, marks.encrypted, marks.decrypted} & set(values)
        assert all(value & ~marks.mask == 0 for value in values)
    assert egress.room(Marks(mask=0xF0, encrypt=0x10, encrypted=0x20, decrypted=0x30)) == 11
    narrow = Marks(mask=0x7, encrypt=1, encrypted=2, decrypted=3)
    assert egress.room(narrow) == 3
    narrowest = Marks(mask=0x3, encrypt=1, encrypted=2, decrypted=3)
    assert [found[1:] for found in refused(*items(marks=narrowest))] == [("$.node", "Cluster/rome/rome")] * 2


@pytest.mark.parametrize(
    "wrong,field,other",
    [
        (policy(node=Name("nobody")), "$.node", "Node/rome/nobody"),
        (policy(pods=(Prefix("10.201.0.0/24"),)), "$.pods[0]", "Cluster/rome/rome"),
        (policy(pods=(Prefix("10.200.3.0/24"), Prefix("10.200.1.7/32"))), "$.pods[1]", "EgressPolicy/rome/shop"),
        (policy(pods=(Prefix("10.200.0.0/16"),)), "$.pods[0]", "EgressPolicy/rome/bank"),
        (policy(destinations=(Prefix("10.200.9.0/24"),)), "$.destinations[0]", "Cluster/rome/rome"),
        (policy(destinations=(Prefix("169.254.169.254/32"),)), "$.destinations[0]", "Cluster/rome/rome"),
        (policy(addresses=(Address("192.0.2.9"),)), "$.addresses[0]", "EgressPolicy/rome/bank"),
        (policy(addresses=(Address("172.18.0.12"),)), "$.addresses[0]", "Node/rome/worker-2"),
        (policy(addresses=(Address("10.200.3.9"),)), "$.addresses[0]", "Cluster/rome/rome"),
    ],
)
def test_what_a_policy_contradicts_is_refused(wrong: EgressPolicy, field: str, other: str) -> None:
    """Who was there first stays; the field and the other object are named."""
    assert refused(*items(), wrong) == [("EgressPolicy/more", field, other)]


@pytest.mark.parametrize(
    "fields,at",
    [
        ({"addresses": ["2001:db8::1"]}, "$.addresses[0]"),
        ({"addresses": ["192.0.2.1", "192.0.2.2"]}, "$.addresses[1]"),
        ({"destinations": ["2001:db8::/64"]}, "$.destinations[0]"),
        ({"destinations": ["192.0.2.0/24", "192.0.2.8/29"]}, "$.destinations[1]"),
        ({"pods": ["10.200.1.0/24", "10.200.1.9"]}, "$.pods[1]"),
        ({"pods": []}, "$.pods"),
    ],
)
def test_what_a_policy_contradicts_by_itself(fields: dict[str, object], at: str) -> None:
    """Families that none of its pods has, and prefixes that overlap."""
    with pytest.raises(DecodeError) as caught:
        convert_topology({"kind": "EgressPolicy", "name": "x", "cluster": "rome", "node": "worker-1", "pods": ["10.200.1.0/24"], **fields})
    assert caught.value.field == at


def test_destinations_of_a_peer_go_through_tunnels() -> None:
    """What pods see of another cluster is not outside, however it is written."""
    base = [cluster("rome"), cluster("milan"), gateway("rome"), gateway("milan"), node("worker-1", 1), node("worker-2", 2), peering()]
    wrong = policy(pods=(Prefix("10.200.1.0/24"),), node=Name("worker-2"), destinations=(Prefix("10.61.2.0/24"),))
    assert refused(*base, wrong) == [("EgressPolicy/more", "$.destinations[0]", "Peering/rome/rome-milan")]
    assert refused(*base, replace(wrong, destinations=(Prefix("0.0.0.0/0"),))) == []


def test_a_node_that_opted_out_lets_nobody_out_where_that_matters() -> None:
    """In strict mode, what goes there in clear is what nobody wanted; else it is the publisher's choice. And so from the node's side."""
    clear = [replace(item, opt_out=True) if item.ref == "Node/rome/worker-3" else item for item in items()]
    clear = [item for item in clear if item.ref != "PublicKey/rome/worker-3"]
    assert refused(*clear) == [("EgressPolicy/bank", "$.node", "Node/rome/worker-3")]
    assert refused(*(replace(item, strict="off") if isinstance(item, Cluster) else item for item in clear)) == []
    third = next(item for item in items() if item.ref == "Node/rome/worker-3")
    assert isinstance(third, Node)
    assert refused(*items(), replace(third, opt_out=True)) == [("Node/worker-3", "$.addresses", "EgressPolicy/rome/bank")]


def test_a_node_needs_an_address_of_each_family_that_it_lets_out() -> None:
    """Its own, or one that the policy gives."""
    without = [replace(item, addresses=item.addresses[:1]) if item.ref == "Node/rome/worker-2" else item for item in items()]  # type: ignore[union-attr]
    assert refused(*without) == [("EgressPolicy/shop", "$.node", "Node/rome/worker-2")]
    given = shop(addresses=(Address("2001:db8:18::99"),))
    assert refused(*(given if item.ref == given.ref else item for item in without)) == []


def test_packets_of_ipv6_need_their_room_in_the_overlay() -> None:
    """1400 bytes are enough for WireGuard, and not for the overlay inside it."""
    found = refused(*items(mtu=1400))
    assert {(ref, field) for ref, field, _ in found} == {("EgressPolicy/shop", "$.node"), ("EgressPolicy/bank", "$.node")}


def test_a_node_of_a_policy_stays_and_its_address_too() -> None:
    """A node goes when no policy names it any more; nobody else takes an address by which pods leave."""
    core = Core()
    tell(core, items())
    outcome = core.hear([Said(("node", "rome", "worker-3"), b"", 1000)])
    assert outcome.refused[0].other in ("Endpoint/rome/post", "EgressPolicy/rome/bank")
    taker = Gateway(name=Name("gateway"), cluster=Name("rome"), addresses=(Address("192.0.2.9"),))
    refusal = core.hear([said(taker, 1001)]).refused[0]
    assert (refusal.field, refusal.other) == ("$.addresses[0]", "EgressPolicy/rome/bank")


def test_published_firewalls_leave_the_marks_alone() -> None:
    """Also where nothing is encrypted: by these bits nodes tell where they lead pods. Who is there first stays."""
    plain = items(encryption="none", strict="off")
    firewall = one_chain(rule(actions=[{"action": "setMark", "value": 1}]))
    bare = [item for item in plain if not isinstance(item, EgressPolicy | PublicKey)]
    assert refused(*bare, firewall) == []
    assert refused(*plain, firewall)[0][1] == "$.chains[0].rules[0].actions[0]"
    assert {other for _, _, other in refused(*bare, firewall, shop())} == {firewall.ref}


def test_numbers_that_others_use_on_a_node_are_asked_for() -> None:
    """The marks' bits, the priority, and all tables among which the planner chooses."""
    uses = {
        "marks": Use(0x10, "somebody"),
        "priorities": Use(layout.RULE_EGRESS, "somebody"),
        "tables": Use(layout.EGRESS_TABLE + 3, "somebody"),
    }
    for kind, use in uses.items():
        core = Core()
        tell(core, [item for item in items(encryption="none", strict="off") if not isinstance(item, EgressPolicy | PublicKey)])
        report = ApplyReport(Name("rome"), Name("worker-1"), 1, 1, (), in_use=InUse(**{kind: (use,)}))
        core.note_in_use(report)
        assert core.hear([said(shop(), 1000)]).refused[0].other == "Node/rome/worker-1"
