"""Overlay devices as messages of the kernel: each kind and family is read as a plan would say it, and what no plan says as none."""

from __future__ import annotations

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from schemas.host_objects import GeneveLink, OverlayLink, VxlanLink
from schemas.values import Address, Mac
from services.kernel.links import _LINK, _changeable, _decode, _is_adoptable, held_overlay
from services.kernel.pyroute import Message
from services.kernel.transaction import Listed

MAC = Mac("02:4d:01:00:10:02")
FOUR, SIX = (Address("192.0.2.1"), Address("192.0.2.2")), (Address("2001:db8::1"), Address("2001:db8::2"))
GENEVE = {"IFLA_GENEVE_ID": 7, "IFLA_GENEVE_PORT": 6081}
VXLAN = {"IFLA_VXLAN_ID": 7, "IFLA_VXLAN_PORT": 4789, "IFLA_VXLAN_LEARNING": 0}
LINKS: list[OverlayLink] = [
    GeneveLink("mo.1", 7, FOUR[1], MAC, 1450),
    GeneveLink("mo.1", 7, SIX[1], MAC, 1450),
    VxlanLink("mo.1", 7, *FOUR, MAC, 1450),
    VxlanLink("mo.1", 7, *SIX, MAC, 1450),
    VxlanLink("mo.1", 7, SIX[0], None, MAC, 1450),
]
DATA = [
    {**GENEVE, "IFLA_GENEVE_REMOTE": FOUR[1]},
    {**GENEVE, "IFLA_GENEVE_REMOTE6": SIX[1]},
    {**VXLAN, "IFLA_VXLAN_LOCAL": FOUR[0], "IFLA_VXLAN_GROUP": FOUR[1]},
    {**VXLAN, "IFLA_VXLAN_LOCAL6": SIX[0], "IFLA_VXLAN_GROUP6": SIX[1]},
    {**VXLAN, "IFLA_VXLAN_LOCAL6": SIX[0]},
]


def message(kind: str, data: dict[str, object], up: bool = True) -> Message:
    """A link of ours as the kernel sends it."""
    sent = ifinfmsg()
    sent["index"], sent["flags"] = 3, int(up)
    inner = {"attrs": [[name, value] for name, value in data.items()]}
    sent["attrs"] = [
        ["IFLA_IFNAME", "mo.1"],
        ["IFLA_MTU", 1450],
        ["IFLA_ADDRESS", MAC],
        ["IFLA_IFALIAS", "meshmark"],
        ["IFLA_LINKINFO", {"attrs": [["IFLA_INFO_KIND", kind], ["IFLA_INFO_DATA", inner]]}],
    ]
    sent.encode()
    received = _LINK(sent.data)
    received.decode()
    return Message(received)


@pytest.mark.parametrize(
    "link,data", list(zip(LINKS, DATA, strict=True)), ids=["geneve 4", "geneve 6", "vxlan 4", "vxlan 6", "vxlan to many"]
)
def test_a_device_reads_as_the_plan_that_makes_it(link: OverlayLink, data: dict[str, object]) -> None:
    """Kind, number, ends, port, MAC and MTU are all there."""
    kind = "geneve" if isinstance(link, GeneveLink) else "vxlan"
    assert held_overlay(_decode(message(kind, data))) == link
    assert held_overlay(_decode(message(kind, data, up=False))) == Listed("link", "link mo.1", "down")
    told = _changeable(link)
    assert (told["kind"], told[f"{kind}_id"]) == (kind, 7)
    assert not link.remote or link.remote in told.values()


@pytest.mark.parametrize(
    "kind,data",
    [
        ("geneve", GENEVE),
        ("geneve", {**DATA[0], "IFLA_GENEVE_COLLECT_METADATA": None}),
        ("geneve", {**DATA[0], "IFLA_GENEVE_INNER_PROTO_INHERIT": None}),
        ("vxlan", {**DATA[2], "IFLA_VXLAN_LEARNING": 1}),
        ("vxlan", VXLAN),
    ],
)
def test_what_no_plan_asks_for_is_always_a_difference(kind: str, data: dict[str, object]) -> None:
    """A device without its end, with tunnels from elsewhere, without Ethernet or that learns is listed by its kind."""
    found = held_overlay(_decode(message(kind, data)))
    assert found == Listed("link", "link mo.1", f"a {kind} device with settings that no plan has")


@pytest.mark.parametrize("held", range(5))
@pytest.mark.parametrize("wanted", range(5))
def test_no_device_becomes_one_of_another_kind_or_family_in_place(held: int, wanted: int) -> None:
    """Only the same kind and family, to one far end or to many, is changed as it stands; anything else is made again."""
    device = _decode(message("geneve" if held < 2 else "vxlan", DATA[held]))
    assert _is_adoptable(device, LINKS[wanted]) == (held == wanted)


def test_a_link_of_another_driver_is_not_ours_to_read() -> None:
    """A device of a kind without data is read by nobody here."""
    assert held_overlay(_decode(message("bridge", {}))) is None
