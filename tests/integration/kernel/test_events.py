"""The event source over a real namespace: who changed what, what is left out, what was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from services.kernel.events import EventSource, KernelEvent
from services.kernel.namespace import enter_network
from tests.contract.kernel.machines import LinuxMachine

pytestmark = pytest.mark.privileged
LIMIT_S = 10.0


def watch(machine: LinuxMachine, act: Callable[[], object], until: Callable[[KernelEvent], bool], **options: int) -> list[KernelEvent]:
    """Events from a source inside the machine's namespace, which takes none before `act` has ended, up to the one that is waited for."""

    async def collect() -> list[KernelEvent]:
        found = []
        async with asyncio.timeout(LIMIT_S), EventSource(**options) as events:
            act()  # the loop stands still meanwhile
            async for event in events:
                found.append(event)
                if until(event):
                    return found
        return found

    def work() -> list[KernelEvent]:
        enter_network(Path("/run/netns") / machine.namespace)
        return asyncio.run(collect())

    return machine._thread.submit(work).result(2 * LIMIT_S)


def test_an_nft_transaction_names_its_process(machine: LinuxMachine) -> None:
    """The process that committed a change of an own table is in the event, by number and name."""
    [event] = watch(machine, lambda: machine.run("nft add table inet meshmark.x"), lambda item: item.layer == "nft")
    assert event == KernelEvent("nft", event.pid, "nft", kind="transaction")
    assert event.pid > 0


def test_transactions_on_other_tables_are_left_out(machine: LinuxMachine) -> None:
    """Somebody else's tables, and ours of another family or for scratch, cause no audit: the first event is of the process after them."""
    others = "nft add table inet other; nft add table inet meshmark.scratch.x; nft add table ip other;"
    printed: list[str] = []
    found = watch(
        machine,
        lambda: printed.append(machine.run(f"{others} nft add table inet meshmark.y & echo $!; wait $!")),
        lambda item: item.layer == "nft",
    )
    assert found[-1].pid == int(printed[0])


@pytest.mark.parametrize(
    "command,layer,kind",
    [
        ("ip route add blackhole 10.9.0.0/16", "route", "new"),
        ("ip rule add pref 77 lookup 9", "rule", "new"),
        ("ip -6 route add blackhole fd00:9::/32", "route", "new"),
        ("ip -6 route add blackhole fd00:9::/32; ip -6 route del blackhole fd00:9::/32", "route", "delete"),
        ("ip -6 rule add pref 77 lookup 9", "rule", "new"),
        ("ip addr add fd00:4::1/64 dev lo", "address", "new"),
        ("ip link add mo.e0 type bridge; ip link set mo.e0 up", "link", "new"),
        ("ip link add mo.e0 type bridge; ip link del mo.e0", "link", "delete"),
        ("ip addr add 10.4.0.1/24 dev lo", "address", "new"),
        ("ip addr del 10.4.0.1/24 dev lo || true; ip addr add 10.4.0.2/24 dev lo; ip addr del 10.4.0.2/24 dev lo", "address", "delete"),
    ],
)
def test_each_layer_of_routing_has_its_events(machine: LinuxMachine, command: str, layer: str, kind: str) -> None:
    """A change by another program is seen in its layer."""
    found = watch(machine, lambda: machine.run(command), lambda item: (item.layer, item.kind) == (layer, kind))
    assert found[-1].overrun is False


def test_a_link_going_down_is_an_event_though_its_routes_vanish_silently(machine: LinuxMachine) -> None:
    """IPv4 routes of a link go without a message; the link's own event is what says so, and of which link."""
    machine.run(
        "ip link add mo.e1 type bridge; ip link set mo.e1 up; ip addr add 10.4.0.1/24 dev mo.e1; ip route add 10.5.0.0/16 via 10.4.0.2"
    )
    found = watch(machine, lambda: machine.run("ip link set mo.e1 down"), lambda item: item.layer == "link")
    assert (found[-1].kind, found[-1].link) == ("down", "mo.e1")


def test_a_flap_is_told_in_both_directions(machine: LinuxMachine) -> None:
    """A link that went down and came back before anybody looked: both are events, with its name."""
    machine.run("ip link add mo.e2 type bridge; ip link set mo.e2 up")
    found = watch(machine, lambda: machine.run("ip link set mo.e2 down; ip link set mo.e2 up"), lambda item: item.kind == "new")
    assert [(item.kind, item.link) for item in found if item.layer == "link"] == [("down", "mo.e2"), ("new", "mo.e2")]


def test_a_bridge_port_that_leaves_has_not_gone_itself(machine: LinuxMachine) -> None:
    """The bridge says that its port is deleted; the link stays up, and is not told as one that fell."""
    machine.run("ip link add mo.e3 type bridge; ip link add mo.e4 type vxlan id 7 local 127.0.0.1 dstport 4789")
    machine.run("ip link set mo.e4 up master mo.e3")
    act = "ip link set mo.e4 nomaster; ip route add blackhole 10.9.0.0/16"
    found = watch(machine, lambda: machine.run(act), lambda item: item.layer == "route")
    assert {item.kind for item in found if item.link == "mo.e4"} == {"new"}


def test_an_address_names_its_link(machine: LinuxMachine) -> None:
    """Which link an address was put on is in the event, and for IPv4 the process, too."""
    [event] = watch(machine, lambda: machine.run("ip addr add 10.4.0.1/24 dev lo"), lambda item: item.layer == "address")
    assert event.link == "lo"
    assert event.pid > 0


def test_a_full_kernel_buffer_is_said(machine: LinuxMachine) -> None:
    """When the kernel drops messages, the loss is an event of its own."""
    commands = [f"route add blackhole 10.9.{number}.0/24" for number in range(64)]
    found = watch(machine, lambda: machine.ip("-batch", "-", commands="\n".join(commands)), lambda item: item.overrun, buffer_bytes=2304)
    assert found[-1] == KernelEvent("all", overrun=True, kind="overrun")


def test_a_full_queue_is_said(machine: LinuxMachine) -> None:
    """A consumer that is too slow gets one overrun instead of an endless queue."""
    commands = [f"route add blackhole 10.9.{number}.0/24\nrule add pref {number + 50} lookup 9" for number in range(16)]
    found = watch(machine, lambda: machine.ip("-batch", "-", commands="\n".join(commands)), lambda item: item.overrun, queue=8)
    assert found[-1].overrun
