"""Topologies that tests share, and the short way from objects to plans."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from schemas import codec
from schemas.plan import HostPlan
from schemas.topology import Cluster, Gateway, Node, Peering, PeeringEnd, Pod, PublicKey, Topology
from schemas.values import Address, Key, Name, Prefix
from services.cli.files import load
from services.planner.compile import compile_all
from services.planner.core import Core, Outcome, Said, settle_rollouts
from services.planner.state import HostId

EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE, DUAL_STACK = EXAMPLES / "two-clusters.yaml", EXAMPLES / "dual-stack.yaml"
ROME_GATEWAY, MILAN_GATEWAY = HostId("rome", "gateway"), HostId("milan", "gateway")
ROME_KEY, MILAN_KEY = Key("A" * 43 + "="), Key("B" * 42 + "A=")


def cluster(name: str, **changes: object) -> Cluster:
    number = {"rome": 0, "milan": 1}.get(name, 2)
    fields = {
        "pod_prefixes": (Prefix("10.200.0.0/16"),),
        "external_prefixes": (Prefix(f"10.{70 + number}.0.0/16"),),
        "internal_prefixes": (Prefix(f"10.{80 + number}.0.0/16"),),
    }
    return Cluster(name=Name(name), **{**fields, **changes})  # type: ignore[arg-type]


def node(name: str, number: int, home: str = "rome", **changes: object) -> Node:
    site = {"rome": 0, "milan": 1}.get(home, 2)
    fields = {"addresses": (Address(f"172.18.{site}.{10 + number}"),), "pod_prefixes": (Prefix(f"10.200.{number}.0/24"),)}
    return Node(name=Name(name), cluster=Name(home), **{**fields, **changes})  # type: ignore[arg-type]


def gateway(home: str, name: str = "gateway", host: int = 10, address: Address | None = None) -> Gateway:
    site = {"rome": 0, "milan": 1}.get(home, 2)
    return Gateway(name=Name(name), cluster=Name(home), addresses=(address or Address(f"172.18.{site}.{host}"),))


def pod(name: str, node_name: str, address: str, home: str = "rome") -> Pod:
    return Pod(name=Name(name), cluster=Name(home), node=Name(node_name), addresses=(Address(address),))


def peering(tunnels: int = 3, **changes: object) -> Peering:
    rome = PeeringEnd(
        cluster=Name("rome"), gateway=Name("gateway"), remap_pods=(Prefix("10.61.0.0/16"),), remap_external=(Prefix("10.62.0.0/16"),)
    )
    milan = PeeringEnd(
        cluster=Name("milan"), gateway=Name("gateway"), remap_pods=(Prefix("10.63.0.0/16"),), remap_external=(Prefix("10.64.0.0/16"),)
    )
    fields: dict[str, object] = {"ends": (rome, milan), "tunnels": tunnels}
    return Peering(name=Name("rome-milan"), cluster=Name("rome"), **{**fields, **changes})  # type: ignore[arg-type]


def keys(rome: Key = ROME_KEY) -> list[Topology]:
    return [
        PublicKey(name=Name("gateway"), cluster=Name("rome"), key=rome),
        PublicKey(name=Name("gateway"), cluster=Name("milan"), key=MILAN_KEY),
    ]


def two_clusters(nodes: int = 2, tunnels: int = 3) -> list[Topology]:
    """Rome and Milan with `nodes` nodes each, joined by one peering; in an order in which all is admitted at once."""
    found: list[Topology] = [cluster("rome"), cluster("milan"), gateway("rome"), gateway("milan")]
    for home in ("rome", "milan"):
        found += [node(f"worker-{number}", number, home) for number in range(1, nodes + 1)]
    found += [peering(tunnels), pod("shop", "worker-1", "10.200.1.10"), pod("bank", "worker-1", "10.200.1.10", "milan")]
    return found


def said(item: Topology, sequence: int) -> Said:
    return Said((item.kind.lower(), item.home, item.name), codec.encode(item), sequence)


def tell(core: Core, items: Iterable[Topology], first: int = 1) -> Outcome:
    """Let the core hear these objects, with sequences from `first` on."""
    return core.hear([said(item, number) for number, item in enumerate(items, first)])


def settled_plans(items: Iterable[Topology]) -> dict[HostId, HostPlan]:
    """Plans of all hosts once every rollout has ended. All objects must be admitted."""
    core = Core()
    outcome = tell(core, items)
    assert not outcome.refused, outcome.refused
    settle_rollouts(core.state, core.allocations)
    return compile_all(core.state, core.allocations)


def example() -> list[Topology]:
    return load([EXAMPLE])


def dual_stack(**changes: dict[str, object]) -> list[Topology]:
    """The example of both families. `changes` are new fields by reference, with `_` for ``/`` and for ``-``: ``Node_rome_worker_1={…}``."""
    items = load([DUAL_STACK])
    names = {item.ref.replace("/", "_").replace("-", "_"): item for item in items}
    assert changes.keys() <= names.keys()
    return [replace(item, **changes.get(name, {})) for name, item in names.items()]


def encrypting(**changes: object) -> list[Topology]:
    """The example of a cluster that encrypts, with its nodes' keys; `changes` are new fields of the cluster."""
    items = load([EXAMPLES / "encryption.yaml", EXAMPLES / "encryption-keys.yaml"])
    return [replace(item, **changes) if isinstance(item, Cluster) else item for item in items]


def without_ipv4(item: Topology) -> Topology:
    """The object with its IPv6 addresses and prefixes only."""

    def kept(value: object) -> object:
        if isinstance(value, tuple) and value and isinstance(value[0], Prefix | Address):
            return tuple(part for part in value if part.family == 6)
        if isinstance(value, tuple) and value and isinstance(value[0], PeeringEnd):
            return tuple(replace(end, **{name: kept(getattr(end, name)) for name in ("remap_pods", "remap_external")}) for end in value)
        return value

    return replace(item, **{name: kept(getattr(item, name)) for name in item.__struct_fields__})
