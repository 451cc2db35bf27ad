"""What the kernel is lent so that it tells of a flow: elements of the trace table's sets. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.commands import TraceFlow
from schemas.host_objects import TRACE_TABLE, NftElement
from schemas.plan import HostPlan
from schemas.values import IPV6, Address


def traced(wish: TraceFlow) -> list[NftElement]:
    """The elements, none twice."""
    found = [_of("flows", address) for address in wish.flow]
    found += [_of("outer", address) for address in wish.outer]
    found += [NftElement(TRACE_TABLE, "ports", str(port)) for port in wish.ports]
    return list({item.key: item for item in found}.values())


def taken(elements: Iterable[NftElement], plan: HostPlan) -> list[NftElement]:
    """Those for which the plan has a set: a host may have nothing of a family that another one on the flow's way has."""
    return [item for item in elements if any(f"set {item.table} {item.set}" in unit for unit in plan.units.values())]


def _of(name: str, address: Address) -> NftElement:
    return NftElement(TRACE_TABLE, f"{name}6" if address.family == IPV6 else name, address)
