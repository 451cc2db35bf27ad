"""One address in several spellings is one address: what is said again in other words changes no plan, and names stay names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas import codec
from schemas.host_objects import VxlanLink
from schemas.topology import Topology
from schemas.values import Address, Name
from services.planner.core import Core, Outcome, Said
from services.planner.names import LINK_NAME_BYTES, overlay_link
from tests.topologies import ROME_GATEWAY, dual_stack, node, peering, pod, settled_plans, tell, two_clusters

SPELLINGS: dict[str, tuple[str, str, Any, Any]] = {
    "capitals and zeros": ("Cluster/rome/rome", "podPrefixes", "fd00:200::/48", "FD00:0200:0:0::/48"),
    "all groups": ("Cluster/rome/rome", "internalPrefixes", "fd00:80::/64", "fd00:0080:0000:0000:0000:0000:0000:0000/64"),
    "another gap": ("Node/rome/worker-1", "addresses", "2001:db8:18::11", "2001:db8:18:0:0::0011"),
    "a quad inside": ("Node/rome/worker-1", "addresses", "2001:db8:18::11", "2001:DB8:18::0.0.0.17"),
    "a pod's": ("Endpoint/rome/shop", "addresses", "fd00:200:0:1::10", "fd00:200::1:0:0:0:10"),
}


def otherwise(case: str) -> tuple[Topology, bytes]:
    """An object of the example, and the same in other words."""
    ref, field, short, other = SPELLINGS[case]
    item = next(item for item in dual_stack() if item.ref == ref)
    data = json.loads(codec.encode(item))
    assert short in data[field], data
    data[field] = [other if value == short else value for value in data[field]]
    return item, json.dumps(data).encode()


@pytest.mark.parametrize("case", SPELLINGS)
def test_another_spelling_is_no_change(case: str) -> None:
    """It is admitted as what it is, and no host gets a plan by it."""
    core = Core()
    tell(core, dual_stack())
    core.published.update({step.host: step.plan for step in core.steps()})
    item, payload = otherwise(case)
    outcome = core.hear([Said((item.kind.lower(), item.home, item.name), payload, 90)])
    assert [entry.item for entry in outcome.admitted] == [item]
    assert core.steps() == []


@pytest.mark.parametrize("item", [pod("twin", "worker-2", "fd00:200:0:1::10"), node("twin", 9, addresses=(Address("2001:db8:18::11"),))])
def test_an_address_that_is_taken_is_taken_in_any_spelling(item: Topology) -> None:
    """A second pod or node under an address that another one has, written otherwise, is refused with the other's name."""
    core = Core()
    tell(core, dual_stack())
    data = json.loads(codec.encode(item))
    data["addresses"] = [{"fd00:200:0:1::10": "FD00:200::1:0:0:0:0010", "2001:db8:18::11": "2001:DB8:18:0:0::0011"}[data["addresses"][0]]]
    (refusal,) = core.hear([Said((item.kind.lower(), item.home, item.name), json.dumps(data).encode(), 90)]).refused
    assert (refusal.field, refusal.other) == ("$.addresses[0]", "Endpoint/rome/shop" if item.kind == "Endpoint" else "Node/rome/worker-1")


def heard_with(prefixes: list[str], core: Core, sequence: int = 1) -> Outcome:
    """What comes of rome with these external prefixes."""
    data = json.loads(codec.encode(dual_stack()[0]))
    data["externalPrefixes"] = prefixes
    return core.hear([Said(("cluster", "rome", "rome"), json.dumps(data).encode(), sequence)])


def test_an_address_alone_is_the_prefix_of_one_address() -> None:
    """As a prefix, `192.0.2.9` is 192.0.2.9/32, and 2001:db8::5 a /128, in whatever spelling."""
    core = Core()
    heard_with(["192.0.2.9", "2001:db8::0005"], core)
    assert core.state.clusters["rome"].external_prefixes == ("192.0.2.9/32", "2001:db8::5/128")
    (again,) = heard_with(["192.0.2.9/32", "2001:DB8::5"], core, 2).admitted
    assert again.item == core.state.clusters["rome"]


def test_a_prefix_with_host_bits_leaves_the_way_free_for_the_right_one() -> None:
    """It is refused and forgotten; the right one comes in, in any spelling, and again as nothing new."""
    core = Core()
    assert heard_with(["10.61.5.9/16", "2001:DB8:0:0::5/64"], core, 1).refused
    assert heard_with(["10.61.0.0/16", "2001:DB8:0:0::/64"], core, 2).admitted
    before = core.state.clusters["rome"]
    assert before.external_prefixes == ("10.61.0.0/16", "2001:db8::/64")
    heard_with(["10.61.0.0/16", "2001:db8::/64"], core, 3)
    assert core.state.clusters["rome"] == before


def test_a_remap_without_a_length_is_one_address_and_refused() -> None:
    """It would lead a whole prefix to one address: the refusal says which length is meant, and what was in force stays."""
    core = Core()
    tell(core, two_clusters())
    data = json.loads(codec.encode(peering()))
    data["ends"][0]["remapPods"] = ["10.61.0.0"]
    (refusal,) = core.hear([Said(("peering", "rome", "rome-milan"), json.dumps(data).encode(), 90)]).refused
    assert (refusal.field, "write a /16" in refusal.reason) == ("$.ends[0].remapPods[0]", True)
    assert core.state.objects["Peering/rome/rome-milan"] == peering()


@pytest.mark.parametrize(
    "prefix,right",
    [
        ("10.61.5.9/16", "10.61.0.0/16"),
        ("2001:DB8:0:0::5/64", "2001:db8::/64"),
        ("128.0.0.0/0", "0.0.0.0/0"),
        ("8000::/0", "::/0"),
    ],
)
def test_host_bits_are_refused_with_what_is_meant(prefix: str, right: str) -> None:
    """Never masked silently: the kernel's interfaces do not agree on what that would be, and a strange /0 is the default route to some."""
    data = json.loads(codec.encode(two_clusters()[0]))
    data["podPrefixes"] = [prefix]
    (refusal,) = Core().hear([Said(("cluster", "rome", "rome"), json.dumps(data).encode(), 1)]).refused
    assert refusal.field == "$.podPrefixes[0]"
    assert f"write {right} for the prefix" in refusal.reason


# Names -----------------------------------------------------------------------------------------------------------------------------------

NAMES = [
    "aws-common-us-east-1",
    "aws-common-us-east-2",
    "ip-10-0-1-23.eu-west-1.compute.internal",
    "b1",
    "b.1",
    "b_1",
    "b-1",
    "B1",
    "twelve-bytes",
    "thirteen-byte",
    "a" * 63,
]


def test_every_name_leads_to_a_link_of_its_own() -> None:
    """At most 15 bytes, no byte that the kernel or nftables reads as more than itself, the same in any order of arrival."""
    hosts = [node(name, 20 + number) for number, name in enumerate(NAMES)]
    base = two_clusters(nodes=0)
    found = []
    for items in (hosts, hosts[::-1]):
        plan = settled_plans([*(item for item in base if item.kind != "Endpoint"), *items])[ROME_GATEWAY]
        found.append({item.name: str(item.remote) for item in plan.objects().values() if isinstance(item, VxlanLink)})
    assert found[0] == found[1]
    assert len(found[0]) == len(NAMES)
    assert all(len(link.encode()) <= LINK_NAME_BYTES and not set(link) & set("%*/: ") for link in found[0])


@pytest.mark.parametrize("name", ["b%d", "b/1", "b 1", "b:1", "b*", "..", ".", "-b", "é" * 8, "", "a" * 64])
def test_a_name_that_no_link_should_have_is_none(name: str) -> None:
    """It is refused where it is said, with what names are made of."""
    with pytest.raises(ValueError, match="is not a name"):
        Name.parse(name)


def test_links_of_names_that_are_cut_alike_differ() -> None:
    """Names that are equal in their first 15 bytes."""
    assert overlay_link("aws-common-us-east-1") != overlay_link("aws-common-us-east-2")
