"""A kernel in memory that behaves: the same interface, ownership, atomicity and errors as ``linux``, without privileges.

A `FakeHost` is the machine and outlives any `FakeKernel` that looks at it, as a real one outlives a restart. It owns nothing outside
itself. It fails where the kernel fails (a link that is not there, somebody else's object in the way, a batch that does not fit), and
wherever `fail` says so. Both kernels pass the same contract suite; packets are the one thing that does not move here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from schemas.commands import TraceFlow
from schemas.host_objects import (
    Layer,
    NftChain,
    PlanObject,
    Sysctl,
    WireguardPeer,
)
from schemas.nft import Comment, Counter
from schemas.status import Capabilities
from schemas.values import Key
from services.kernel.fake_host import FakeHost
from services.kernel.fake_nft import committed, listed
from services.kernel.fake_objects import FakeObjects
from services.kernel.peers import as_planned
from services.kernel.port import ALL_LAYERS, Flow, KeyRing, PeerSeen, RuleCount
from services.kernel.sysctls import general_of, stricter
from services.kernel.trace_rules import SESSIONS_MAX
from services.kernel.transaction import Change, Listed, Marker, Observed
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown

_GREETING_BYTES = 148
"""WireGuard's first message of a handshake."""


class FakeKernel:
    """``port.Kernel`` over a `FakeHost`.

    `fail` is asked before every change, also those of a batch. An error that it returns is raised instead of making the change; an
    OutcomeUnknown is raised after making it, since that is the case which callers forget. With `looks_only` it is the kernel of a process
    that has no private key.
    """

    def __init__(
        self,
        host: FakeHost | None = None,
        fail: Callable[[Change], Exception | None] = lambda _change: None,
        *,
        looks_only: bool = False,
    ) -> None:
        self.host = host or FakeHost()
        self.fail = fail
        self._looks_only = looks_only
        self._objects = FakeObjects(self.host, looks_only=looks_only)
        self._seen: dict[Layer, bytes | None] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities("fake", "fake", self.host.wireguard)

    def public_key(self) -> Key:
        return self.host.public_key()

    def keys(self) -> KeyRing:
        return self.host.keys()

    def make_next_key(self) -> None:
        if not self.host.next_key:
            made = self.host.withdrawn_key or hashlib.blake2b(self.host.private_key, digest_size=32).digest()
            self.host.next_key, self.host.withdrawn_key = made, b""

    def withdraw_next_key(self) -> None:
        if self.host.next_key:
            self.host.next_key, self.host.withdrawn_key = b"", self.host.next_key

    def forget_withdrawn_key(self) -> None:
        self.host.withdrawn_key = b""

    def promote_key(self, key: Key) -> None:
        ring = self.keys()
        if key == ring.next:
            self.host.private_key, self.host.next_key = self.host.next_key, b""
        elif key == ring.withdrawn:
            self.host.private_key, self.host.withdrawn_key = self.host.withdrawn_key, b""

    def read(self, wanted: Mapping[str, PlanObject], layers: Collection[Layer] = ALL_LAYERS) -> Observed:
        self._seen.update((layer, self.fingerprint(layer)) for layer in layers)
        found = {key: listed(item) for key, item in self.host.objects.items() if item.layer in layers}
        if "wireguard" in layers:
            found |= as_planned({key: item for key, item in found.items() if isinstance(item, WireguardPeer)}, wanted)
        if "sysctl" in layers:
            names = {item.name for item in wanted.values() if isinstance(item, Sysctl)}
            names |= set() if self._looks_only else set(self.host.kept_sysctls)
            for name in sorted(names):
                if (value := self.host.sysctl(name)) is not None:
                    general = general_of(name)
                    found[f"sysctl {name}"] = Sysctl(name, stricter(value, self.host.sysctl(general)) if general else value)
        return found

    def fingerprint(self, layer: Layer) -> bytes | None:
        if layer not in ("nft", "rule", "route"):
            return None
        held = [item for item in self.host.objects.values() if item.layer == layer]
        return repr((held, self.host.marker if layer == "nft" else None)).encode()

    def seen(self, layer: Layer) -> bytes | None:
        return self._seen.get(layer)

    def reference(self, wanted: Mapping[str, PlanObject]) -> Observed:
        return {key: self._objects.normal(item) for key, item in wanted.items()}

    def write(self, change: Change) -> None:
        error = self.fail(change)
        if error is not None and not isinstance(error, OutcomeUnknown):
            raise error
        if change.new is None:
            self._objects.remove(change)
        else:
            self._objects.put(change.new)
        if error is not None:
            raise error

    def write_all(self, changes: Sequence[Change]) -> Mapping[str, MeshmarkError]:
        errors: dict[str, MeshmarkError] = {}
        # Routes may rest on one another, so they alone are made in the order that they come in.
        for change in sorted(changes, key=lambda change: change.new is None and change.subject.layer != "route"):
            try:
                self.write(change)
            except MeshmarkError as error:
                errors[change.key] = error
        return errors

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        errors = []
        for change in batch:
            if (error := self.fail(change)) is not None:
                if isinstance(error, MeshmarkError):
                    error.key = change.key
                errors.append(error)
        refused = next((error for error in errors if not isinstance(error, OutcomeUnknown)), None)
        if refused is not None:
            raise refused
        self.host.objects = committed(self.host.objects, batch)
        self.host.marker = marker
        self.host.commits += 1
        if errors:
            raise errors[0]

    def trace(self, wish: TraceFlow) -> bool:
        flow = replace(wish, seconds=1)
        traced = self.host.traced
        if flow not in traced and len(traced) >= SESSIONS_MAX:
            msg = f"{SESSIONS_MAX} flows are traced here already; wait for one to end"
            raise Conflict(msg)
        traced[flow] = max(wish.seconds, traced.get(flow, 0))
        return True

    def forget_traced(self) -> float | None:
        return min(self.host.traced.values(), default=None)

    def links(self) -> Mapping[str, bool]:
        return {name: not isinstance(self.host.objects.get(f"link {name}"), Listed) for name in self.host.links()}

    def marker(self) -> Marker | None:
        return self.host.marker

    def peers(self, link: str) -> Sequence[PeerSeen]:
        times, by_link = self.host.handshakes_s, self.host.handshakes_s.get(link, 0.0)
        held = [item for item in self.host.objects.values() if isinstance(item, WireguardPeer) and item.link == link]
        learned, greeted = self.host.learned, self.host.greeted
        return [
            PeerSeen(
                item.public_key,
                learned.get(item.key, item.endpoint),
                times.get(item.key, by_link),
                sent_bytes=_GREETING_BYTES if item.key in greeted else 0,
            )
            for item in held
        ]

    def greet(self, link: str, keys: Collection[Key]) -> None:
        for peer in self.peers(link):
            if peer.public_key in keys and peer.endpoint is not None and not peer.handshake_s:
                self.host.greeted.append(f"peer {link} {peer.public_key}")

    def counted(self, table: str) -> Sequence[RuleCount]:
        return [
            RuleCount(chain.name, number, item.text, *self.host.counts.get(item.text, (0, 0)))
            for chain in self.host.objects.values()
            if isinstance(chain, NftChain) and chain.table == table
            for number, rule in enumerate(chain.rules, 1)
            if Counter() in rule
            for item in rule
            if isinstance(item, Comment)
        ]

    def flows(self) -> Iterable[Flow]:
        return list(self.host.flows)

    def drop_flows(self, flows: Iterable[Flow]) -> int:
        gone = set(flows)
        before = len(self.host.flows)
        self.host.flows = [flow for flow in self.host.flows if flow not in gone]
        return before - len(self.host.flows)

    def close(self) -> None:
        self.host.traced.clear()


__all__ = ["FakeHost", "FakeKernel"]
