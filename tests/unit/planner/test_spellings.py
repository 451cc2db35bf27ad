"""One address in several spellings is one address: what is said again in other words changes no plan, and names stay names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas import codec
from schemas.host_objects import VxlanLink
from schemas.topology import Topology
from schemas.values import Name
from services.planner.core import Core, Said
from services.planner.names import LINK_NAME_BYTES, overlay_link
from tests.topologies import ROME_GATEWAY, dual_stack, node, settled_plans, tell, two_clusters

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


def test_an_address_alone_is_the_prefix_of_one_address() -> None:
    """As a prefix, `192.0.2.9` is 192.0.2.9/32, and 2001:db8::5 a /128."""
    core = Core()
    data = json.loads(codec.encode(two_clusters()[0]))
    data["externalPrefixes"] = ["192.0.2.9", "10.70.0.0/16"]
    core.hear([Said(("cluster", "rome", "rome"), json.dumps(data).encode(), 1)])
    assert core.state.clusters["rome"].external_prefixes[0] == "192.0.2.9/32"


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
