"""Published routes in a real kernel and the fake one: they load, list as their reference says, and go without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.host_objects import LinkAddress, NextHop, PlanObject, VxlanLink
from schemas.plan import Entry, HostPlan, SummedUnit
from schemas.routing import RouteConfiguration
from schemas.values import IPV4, IPV6, Address, Mac, Name
from services.applier.steps import order
from services.cli.render import plan_text
from services.kernel.transaction import repairs
from services.planner.compile.facts import Facts
from tests.contract.kernel.machines import FakeMachine, LinuxMachine, Machine, converge, differences
from tests.emulated import examples
from tests.routes import compiled, configurations, routes, to

pytestmark = pytest.mark.any_kernel

LINKS = ["d0", "d1"]
SOURCES = {4: "10.80.2.1", 6: "fd00:80::1"}
TUNNELS = ("d2", "d3")
HOPS = (
    (IPV4, tuple(NextHop(link, weight=weight) for weight, link in enumerate(TUNNELS, 1))),
    (IPV6, tuple(NextHop(link, Address("fd00:81::2"), onlink=True) for link in TUNNELS)),
)


@pytest.fixture(scope="module", params=["fake", pytest.param("linux", marks=pytest.mark.privileged)])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with four links and an address of each family."""
    made = FakeMachine() if request.param == "fake" else LinuxMachine(tmp_path_factory.mktemp("state"))
    try:
        converge(made.kernel, {item.key: item for item in links()})
        yield made
    finally:
        made.close()


def links() -> Iterator[PlanObject]:
    for number, name in enumerate((*LINKS, *TUNNELS), 1):
        yield VxlanLink(name, number, Address("127.0.0.1"), Address(f"127.0.0.{number + 1}"), Mac(f"02:4d:01:00:00:0{number}"), 1450)
    yield LinkAddress("d0", Address("10.80.2.1"), 32)
    yield LinkAddress("d0", Address("fd00:80::1"), 128)


def hold(machine: Machine, wanted: dict[str, PlanObject]) -> None:
    """Bring the machine from what it holds to what is wanted, in the applier's order."""
    found = repairs(wanted, machine.kernel.reference(wanted), machine.kernel.read(wanted))
    steps = order(found, machine.kernel.read(wanted), wanted, ())
    for change in (*steps.leave, *steps.stage, *steps.connect, *steps.remove):
        machine.kernel.write(change)


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(items=st.lists(configurations(LINKS, SOURCES), min_size=1, max_size=3))
def test_any_valid_configuration_loads_and_lists_as_its_reference(shared: Machine, items: list[RouteConfiguration]) -> None:
    """From nothing, and each as a difference from the one before; deleted it leaves nothing."""
    base = {item.key: item for item in links()}
    known = Facts(TUNNELS, ("Peering/rome/rome-milan",), HOPS)
    try:
        for item in items:
            wanted = base | compiled(item, known)
            hold(shared, wanted)
            assert differences(shared.kernel, wanted) == []
    finally:
        hold(shared, base)
    assert dict(shared.kernel.read(base)).keys() == base.keys()


@pytest.mark.privileged
@pytest.mark.parametrize("shared", ["linux"], indirect=True)
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(item=configurations(LINKS, SOURCES))
def test_what_is_printed_makes_the_same_in_a_kernel(shared: LinuxMachine, item: RouteConfiguration) -> None:
    """The lines of ``meshmark plan``, given to ``ip``, make exactly what the plan says."""
    base = {item.key: item for item in links()}
    made = compiled(item, Facts(TUNNELS, (), HOPS))
    try:
        text = plan_text(
            HostPlan(Name("rome"), Name("gateway"), {"route/rome/test": SummedUnit.of(Entry(found, ()) for found in made.values())})
        )
        shared.run(text)
        assert differences(shared.kernel, base | made) == []
    finally:
        hold(shared, base)


SEED_LINKS = {"liqo-tunnel": "169.254.18.2/30", "liqo-tunnel1": "169.254.18.6/30", "liqo.n556fkng95": "10.80.0.3/32"}
ECMP = [{"dev": "liqo-tunnel", "via": "169.254.18.1"}, {"dev": "liqo-tunnel1", "via": "169.254.18.5", "weight": 2}]
BY_WORKER = [{"dev": "liqo.n556fkng95", "via": "10.80.0.2"}]
SEED = (
    routes(
        "milan-gw-ext",
        table=1001,
        rules=[{"fwmark": 0xFF00, "to": "10.200.0.0/16", "priority": 5000}],
        routes=[{"prefix": "10.200.0.0/16", "nextHops": ECMP}],
    ),
    routes(
        "worker-gw-node",
        table=1002,
        rules=[
            {"to": "10.80.0.2", "priority": 5001},
            {"fwmark": "0xfe00", "to": "10.200.1.9", "priority": 5002},
            {"iif": "liqo-tunnel", "to": "10.200.1.10", "priority": 5003},
        ],
        routes=[to("10.200.1.9", nextHops=BY_WORKER), to("10.200.1.10", nextHops=BY_WORKER), to("10.80.0.2", "liqo.n556fkng95")],
    ),
    # The other system's: marked packets go by the WireGuard device, with an address that the far end allows.
    routes(
        "antrea-wg", table=10, rules=[{"fwmark": 0x4D2, "priority": 1000}], routes=[to("0.0.0.0/0", "liqo-tunnel", source="169.254.18.2")]
    ),
)
SEED_LISTING = """
1000:	from all fwmark 0x4d2 lookup 10 proto 77
5000:	from all to 10.200.0.0/16 fwmark 0xff00 lookup 1001 proto 77
5001:	from all to 10.80.0.2 lookup 1002 proto 77
5002:	from all to 10.200.1.9 fwmark 0xfe00 lookup 1002 proto 77
5003:	from all to 10.200.1.10 iif liqo-tunnel lookup 1002 proto 77
default dev liqo-tunnel proto 77 scope link src 169.254.18.2
10.200.0.0/16 proto 77
	nexthop via 169.254.18.1 dev liqo-tunnel weight 1
	nexthop via 169.254.18.5 dev liqo-tunnel1 weight 2
10.80.0.2 dev liqo.n556fkng95 proto 77 scope link
10.200.1.9 via 10.80.0.2 dev liqo.n556fkng95 proto 77
10.200.1.10 via 10.80.0.2 dev liqo.n556fkng95 proto 77
"""


@pytest.mark.privileged
def test_the_seeds_routing_loads_and_lists_as_the_seed_shows_it(tmp_path: Path) -> None:
    """By mark with several next hops, by interface, to a node and its pods, and with a source; removed it leaves nothing."""
    machine = LinuxMachine(tmp_path)
    try:
        for link, address in SEED_LINKS.items():
            far = f"far{len(link)}"
            machine.run(
                f"ip link add {link} type veth peer {far}; ip link set {link} up; ip link set {far} up; ip addr add {address} dev {link}"
            )
        wanted = {key: item for one in reversed(SEED) for key, item in compiled(one).items()}
        hold(machine, wanted)
        assert differences(machine.kernel, wanted) == []
        text = machine.run("ip rule | grep 'proto 77'; for table in 10 1001 1002; do ip route list table $table; done")
        assert [line.rstrip() for line in text.splitlines()] == SEED_LISTING.strip("\n").splitlines()
        hold(machine, {})
        assert machine.run("ip route list table all proto 77; ip rule | grep 'proto 77' || true") == ""
    finally:
        machine.close()
