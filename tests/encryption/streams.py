"""Streams between pods of two nodes that encrypt, and what of them was lost on the way.

What found no room in a node's socket on a busy machine is told apart from that (``tests.talks``).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable

from schemas.values import FAMILIES, Family
from services.cli.lab import namespaces, traffic
from services.cli.lab.layout import PREFIX
from tests.encryption import wire
from tests.encryption.site import Site
from tests.talks import overrun

FLOWS = 2
"""In each direction and family: few, since what is asked is whether any is lost, and not how much a node can take."""


class Streams:
    """Flows that run. `lost` is true once they have ended."""

    def __init__(self, flows: list[traffic.Traffic]) -> None:
        self.flows = flows
        self._overrun_before = _overrun()
        self.overrun = 0
        """Packets for which a node's WireGuard had no room, because it was not given a processor."""

    @property
    def sent(self) -> int:
        return sum(flow.sent for flow in self.flows)

    @property
    def lost(self) -> int:
        """Datagrams without an answer, less those for which there was no room."""
        return max(0, sum(flow.lost for flow in self.flows) - self.overrun)

    def __str__(self) -> str:
        overrun = f" (and {self.overrun} for want of a processor)" if self.overrun else ""
        return f"{self.lost} of {self.sent} datagrams{overrun}"

    def end(self) -> None:
        self.overrun = _overrun() - self._overrun_before


@contextlib.asynccontextmanager
async def streams(site: Site, families: Iterable[Family] = FAMILIES, other: str = "stock", *, begun: bool = True) -> AsyncIterator[Streams]:
    """Flows between a pod of worker-1 and another one, begun at either end, in these families; without `begun`, nothing need arrive yet."""
    pairs = [(client, server, family) for client, server in (("shop", other), (other, "shop")) for family in families]
    for client, server, family in pairs if begun else ():  # neighbours and sessions are there before what is to be judged begins
        await wire.talk(f"rome.pod.{client}", f"rome.pod.{server}", site.pod(server, family), family)
    async with contextlib.AsyncExitStack() as stack:
        found = Streams([])
        stack.callback(found.end)
        for client, server, family in pairs:
            names = f"{PREFIX}rome.pod.{client}", f"{PREFIX}rome.pod.{server}"
            found.flows.append(await stack.enter_async_context(traffic.running(*names, site.pod(server, family), FLOWS)))
        yield found


def _overrun() -> int:
    """Datagrams that found no room in a socket, in all nodes' namespaces, of both families."""
    nodes = [name for name in namespaces.existing() if name.startswith(f"{PREFIX}rome.worker-")]
    return sum(map(overrun, nodes))
