"""What any kernel promises about one nft batch: all or nothing, the right error, and any step from one plan to the next."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject, Sysctl
from schemas.nft import Counter, Match, Verdict, VerdictMap
from services.kernel.transaction import Change, Marker, changes, with_dependents
from services.runtime.errors import Conflict, MeshmarkError, Permanent
from tests.contract.kernel.machines import OVER_BOTH_ENGINES, Machine, differences

pytestmark = OVER_BOTH_ENGINES

T = "meshmark.step"
ACCEPT, DROP = (Verdict("accept"),), (Counter(), Verdict("drop"))
MARKER = Marker(1, 1, {"aa": "bb"})


def plan_of(*objects: PlanObject) -> dict[str, PlanObject]:
    return {item.key: item for item in (NftTable(T), *objects)}


BASE = plan_of(
    NftSet(T, "names", "ifname", "verdict", interval=True),
    NftElement(T, "names", "mo.*", "jump one"),
    NftElement(T, "names", "mt.*", "jump two"),
    NftSet(T, "prefixes", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True),
    NftElement(T, "prefixes", "10.0.0.0/8", "11.0.0.0/8"),
    NftSet(T, "hosts", "ipv4_addr"),
    NftElement(T, "hosts", "10.0.0.1"),
    NftElement(T, "hosts", "10.0.0.2"),
    NftChain(T, "one", (ACCEPT,)),
    NftChain(T, "two", ((Verdict("jump", "one"),),)),
    NftChain(T, "in", ((VerdictMap("iifname", "names"),), (Match("ip saddr", ("@hosts",)), *DROP)), "filter", "prerouting", -150),
)


def _changed(*objects: PlanObject, without: tuple[str, ...] = ()) -> dict[str, PlanObject]:
    found = {**BASE, **{item.key: item for item in objects}}
    return {key: item for key, item in found.items() if key not in without}


STEPS = {
    "nothing": BASE,
    "all gone": {},
    "rules of a chain": _changed(NftChain(T, "one", (DROP, ACCEPT))),
    "chain emptied": _changed(NftChain(T, "one", ())),
    "priority": _changed(NftChain(T, "in", (ACCEPT,), "filter", "prerouting", -140)),
    "policy": _changed(NftChain(T, "in", (ACCEPT,), "filter", "prerouting", -150, "drop")),
    "hook and type": _changed(NftChain(T, "in", (ACCEPT,), "nat", "postrouting", 100)),
    "element added": _changed(NftElement(T, "hosts", "10.0.0.3")),
    "element removed": _changed(without=(f"element {T} hosts 10.0.0.1",)),
    "element replaced by an overlapping one": _changed(
        NftElement(T, "prefixes", "10.0.0.0/9", "12.0.0.0/9"), without=(f"element {T} prefixes 10.0.0.0/8",)
    ),
    "address in a map of prefixes": _changed(NftElement(T, "prefixes", "12.0.0.1", "13.0.0.1")),
    "value of an element": _changed(NftElement(T, "prefixes", "10.0.0.0/8", "12.0.0.0/8")),
    "verdict of a name": _changed(NftElement(T, "names", "mo.*", "drop")),
    "name gone": _changed(without=(f"element {T} names mo.*",)),
    "name in place of another": _changed(
        NftElement(T, "names", "m*", "jump one"), without=(f"element {T} names mo.*", f"element {T} names mt.*")
    ),
    "chain and the jumps to it gone": _changed(
        NftChain(T, "two", (ACCEPT,)), NftElement(T, "names", "mo.*", "return"), without=(f"chain {T} one",)
    ),
    "map and its user gone": _changed(
        NftChain(T, "in", (ACCEPT,), "filter", "prerouting", -150),
        without=(f"set {T} names", f"element {T} names mo.*", f"element {T} names mt.*", f"chain {T} one", f"chain {T} two"),
    ),
    "header of a set": _changed(NftSet(T, "hosts", "ipv4_addr", interval=True)),
    "header of a verdict map": _changed(
        NftSet(T, "names", "ifname", "verdict"),
        NftElement(T, "names", "eth0", "jump one"),
        without=(f"element {T} names mo.*", f"element {T} names mt.*"),
    ),
    "new chain, new jump": _changed(NftChain(T, "three", (ACCEPT,)), NftElement(T, "names", "wg0", "jump three")),
    "second table": _changed(NftTable("meshmark.two"), NftChain("meshmark.two", "c", (ACCEPT,), "filter", "input", 0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_batch_leads_from_one_plan_to_the_next_and_back(machine: Machine, name: str) -> None:
    """Every kind of step, and its inverse, is one transaction that ends in exactly the wanted state."""
    target = STEPS[name]
    machine.kernel.commit(changes({}, BASE), None)
    machine.kernel.commit(with_dependents(changes(BASE, target), target), MARKER)
    assert differences(machine.kernel, target) == []
    machine.kernel.commit(with_dependents(changes(target, BASE), BASE), None)
    assert differences(machine.kernel, BASE) == []


@dataclass
class Refused:
    """A batch that the kernel must refuse, and how."""

    changes: list[Change]
    error: type[MeshmarkError] | tuple[type[MeshmarkError], ...]


def _add(item: PlanObject) -> Change:
    return Change(None, item)


REFUSED = {
    "element of a missing set": Refused([_add(NftElement(T, "nowhere", "10.0.0.1"))], Conflict),
    "object of a missing table": Refused([_add(NftChain("meshmark.nowhere", "c", ()))], Conflict),
    "rule naming a missing set": Refused([_add(NftChain(T, "new", ((Match("ip saddr", ("@nowhere",)), *ACCEPT),)))], Conflict),
    "jump to a missing chain": Refused([_add(NftChain(T, "new", ((Verdict("jump", "nowhere"),),)))], Conflict),
    "verdict to a missing chain": Refused([_add(NftElement(T, "names", "eth0", "jump nowhere"))], Conflict),
    "removal of a missing element": Refused([Change(NftElement(T, "hosts", "10.9.9.9"), None)], Conflict),
    "removal of a missing name with *": Refused([Change(NftElement(T, "names", "zz*", "accept"), None)], Conflict),
    "removal of a missing chain": Refused([Change(NftChain(T, "nowhere", ()), None)], Conflict),
    "removal of a missing set": Refused([Change(NftSet(T, "nowhere", "ipv4_addr"), None)], Conflict),
    "removal of a missing table": Refused([Change(NftTable("meshmark.nowhere"), None)], Conflict),
    "removal of a set in use": Refused([Change(NftSet(T, "hosts", "ipv4_addr"), None)], Conflict),
    "removal of a chain in use": Refused([Change(NftChain(T, "one", (ACCEPT,)), None)], Conflict),
    "another value for an element": Refused([_add(NftElement(T, "prefixes", "10.0.0.0/8", "12.0.0.0/8"))], Conflict),
    "overlapping element": Refused([_add(NftElement(T, "prefixes", "10.1.0.0/16", "12.0.0.0/16"))], Conflict),
    "another header for a set": Refused([_add(NftSet(T, "hosts", "ifname"))], Conflict),
    # Linux 6.1 says that the chain is there, later ones that this is not supported: read again, or give up, and both lead to the truth.
    "another priority for a chain": Refused([_add(NftChain(T, "in", (), "filter", "prerouting", 5))], (Conflict, Permanent)),
    "no nft object": Refused([_add(Sysctl("net/ipv4/ip_forward", "1"))], Permanent),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_batch_changes_nothing(machine: Machine, name: str) -> None:
    """With good changes around the bad one, none of them is made, the marker stays, and the error says what to do, and of which object."""
    refused = REFUSED[name]
    machine.kernel.commit(changes({}, BASE), MARKER)
    before = dict(machine.kernel.read({}))
    good = [Change(None, NftElement(T, "hosts", "10.0.0.77")), Change(BASE[f"chain {T} one"], NftChain(T, "one", (DROP,)))]
    with pytest.raises(refused.error) as caught:
        machine.kernel.commit([good[0], *refused.changes, good[1]], Marker(9, 9, {}))
    [change] = refused.changes
    # libnftables blames the first lines of a batch, so nothing is said of its errors
    assert caught.value.key == ("" if machine.engine == "libnftables" or change.subject.layer != "nft" else change.key)
    assert dict(machine.kernel.read({})) == before
    assert machine.kernel.marker() == MARKER
