"""Published routes: a routing table for hosts that a selector picks, and the policy rules that look it up.

The words are those of ``ip route`` and ``ip rule``; the seed's (Liqo's RouteConfiguration) are among them. What the words mean in detail,
and what the kernel does not take, is checked in ``schemas.routing_check``.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from schemas.objects import PassThrough, Strict
from schemas.routes import METRIC_MAX, RouteType, Scope
from schemas.values import Address, Prefix

ALL_TUNNELS = "@tunnels"
"""Stands for all tunnels that a host has, in the place of an interface."""
LAST_TABLE = 4294967295
LAST_PRIORITY = 32765
"""The last one before main's."""
WEIGHT_MAX = 256
HOPS_MAX = 256


class RouteHop(Strict, frozen=True, kw_only=True):
    """Where a route goes: out of the interface `dev`, to the neighbour `via` if given.

    `onlink` says that the neighbour is there whatever the interface's addresses say. A hop of `weight` 3 gets three times the flows of
    weight 1. ``dev: "@tunnels"`` stands for all tunnels that carry traffic, with the weights of their peering.
    """

    dev: str
    via: Address | None = None
    onlink: bool = False
    weight: Annotated[int, Meta(ge=1, le=WEIGHT_MAX)] | None = None


class PublishedRoute(Strict, frozen=True, kw_only=True):
    """One route. Types other than unicast have no next hops; `throw` ends the look-up in this table and goes on with the next rule.

    `source` is the address that the host's own packets get; `scope` is for IPv4, and follows from the next hops where it is left out.
    """

    prefix: Prefix
    type: RouteType = "unicast"
    next_hops: Annotated[tuple[RouteHop, ...], Meta(max_length=HOPS_MAX)] = ()
    source: Address | None = None
    scope: Scope | None = None
    metric: Annotated[int, Meta(ge=0, le=METRIC_MAX)] = 0


class PublishedRule(Strict, frozen=True, kw_only=True):
    """One policy rule: packets that match all that is given look the configuration's table up.

    `from` and `to` are prefixes of one family; a rule with neither is made for each family that the configuration's routes have, and for
    both where it has none. `iif` is ``lo`` for what the host itself sends; ``"@tunnels"`` is a rule for each tunnel. `fwmark` is looked at
    under `mask`, all bits without one.
    """

    source: Prefix | None = field(default=None, name="from")
    to: Prefix | None = None
    iif: str | None = None
    oif: str | None = None
    fwmark: int | str | None = None
    mask: int | str | None = None
    priority: Annotated[int, Meta(ge=1, le=LAST_PRIORITY)] | None = None


class RouteConfiguration(PassThrough, frozen=True, kw_only=True, tag=True):
    """Routes in one table, and rules that look it up. Without `table`, the table is one of its own, with a number made from the name.

    Rules without a `priority` all have the same one, made from `order` and the name: they look the same table up.
    """

    table: Annotated[int, Meta(ge=1, le=LAST_TABLE)] | None = None
    routes: Annotated[tuple[PublishedRoute, ...], Meta(max_length=10_000)] = ()
    rules: Annotated[tuple[PublishedRule, ...], Meta(max_length=1000)] = ()
