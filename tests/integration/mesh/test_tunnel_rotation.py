"""A gateway changes its key while two clusters talk through all of its tunnels: not one packet is lost, whichever end it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.topology import Peering, Pod
from schemas.values import FAMILIES, Address
from services.applier import greetings
from services.cli.files import load
from services.cli.lab.expected import joined as between
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.integration.mesh.turning import turn_over, up
from tests.talks import assert_none_lost, blocking, talking, until
from tests.topologies import DUAL_STACK, MILAN_GATEWAY, ROME_GATEWAY
from tests.turnovers import Turnovers

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(300)]

PORT = 51840
ENDS = (ROME_GATEWAY, MILAN_GATEWAY)
FLOWS = 8
"""In each direction and family: by their ports, they are spread over the tunnels."""
TURNING = pytest.mark.parametrize("turning", ENDS, ids=str)


@pytest.fixture(params=[3])
def joined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Turnovers[LinuxHost]]:
    """Two clusters of both families, joined by so many tunnels."""
    items = [replace(item, tunnels=request.param) if isinstance(item, Peering) else item for item in load([DUAL_STACK])]
    with up(items, ENDS, tmp_path) as found:
        yield found


def streams(joined: Turnovers[LinuxHost]) -> list[tuple[str, str, Address]]:
    """What a pod of each cluster sends one of the other, several times."""
    objects = joined.core.state.objects
    ends = [objects["Endpoint/rome/shop"], objects["Endpoint/milan/post"]]
    found = []
    for here, there in (ends, reversed(ends)):
        assert isinstance(here, Pod)
        assert isinstance(there, Pod)
        for family in FAMILIES:
            walk = between(objects.values(), here.cluster, there.cluster, family)
            assert walk is not None
            dial = walk.dial(next(address for address in there.addresses if address.family == family))
            found += [(f"{here.cluster}.pod.{here.name}", f"{there.cluster}.pod.{there.name}", dial)] * FLOWS
    return found


def stages(joined: Turnovers[LinuxHost]) -> list[str]:
    tunnels = joined.core.state.peerings["Peering/rome/rome-milan"].tunnels
    return ["beside", *(["moved", "rekeyed"] * tunnels), "back", "leaving", "done"]


def sent(joined: Turnovers[LinuxHost]) -> dict[str, int]:
    """The bytes that the first end has sent through each of its tunnels."""
    lines = joined.hosts[ROME_GATEWAY].run("wg", "show", "all", "transfer").splitlines()
    return {words[0]: int(words[3]) for words in map(str.split, lines)}


async def they_carry(joined: Turnovers[LinuxHost]) -> None:
    """Until something more has gone through the only tunnel, or through two: flows are spread by chance, and one may be met by none."""
    before = sent(joined)
    await until(lambda: sum(count > before[link] + 1000 for link, count in sent(joined).items()) >= min(2, len(before)), lambda: None)


@pytest.mark.parametrize("joined", [1, 3], indirect=True, ids=["one tunnel", "three tunnels"])
@TURNING
async def test_no_packet_is_lost(joined: Turnovers[LinuxHost], turning: HostId) -> None:
    """Both clusters talk in both directions and families, through all tunnels, before and after."""
    async with talking(streams(joined)) as talks:
        await they_carry(joined)
        await turn_over(joined, turning, stages(joined))
        await they_carry(joined)
    assert_none_lost(talks)


@pytest.mark.any_kernel
@TURNING
async def test_appliers_restart_at_every_stage(joined: Turnovers[LinuxHost], turning: HostId) -> None:
    """What those of both ends have forgotten, they find in the kernel and in the key files."""

    def restart() -> None:
        for host in ENDS:
            joined.hosts[host].restart()

    async with talking(streams(joined)) as talks:
        await turn_over(joined, turning, stages(joined), restart)
    assert_none_lost(talks)


@pytest.mark.any_kernel
@pytest.mark.parametrize("late", ENDS, ids=lambda host: f"{host} is late")
@TURNING
async def test_an_applier_restarts_after_every_step_that_it_missed(
    joined: Turnovers[LinuxHost], turning: HostId, late: HostId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end goes first, and the one that comes back finds the kernel a step behind: it takes none of its tunnels for withdrawn."""
    found: list[frozenset[str]] = []

    def late_round() -> bool:
        was_new = joined.plan()
        joined.follow(set(joined.hosts) - {late})
        joined.hosts[late].restart()
        if was_new:
            found.append(joined.hosts[late].ask(lambda _, applier: applier.found_withdrawn(joined.plans[late])))
        joined.follow()
        return was_new

    monkeypatch.setattr(joined, "round", late_round)
    async with talking(streams(joined)) as talks:
        await turn_over(joined, turning, stages(joined))
    assert_none_lost(talks)
    assert len(found) >= len(stages(joined)) - 1
    assert set(found) == {frozenset()}


@pytest.mark.any_kernel
@TURNING
async def test_the_far_end_is_away(joined: Turnovers[LinuxHost], turning: HostId, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither follows nor answers: the change waits and says so; when it is back, the change goes on, and loses nothing."""
    (far,) = set(ENDS) - {turning}
    joined.away.add(far)
    joined.hosts[far].run("nft", blocking(f"{PORT}-{PORT + 63}"))
    monkeypatch.setattr(greetings, "ASKED_S", 2.0)
    monkeypatch.setattr(greetings, "AWAY_S", 2.0)
    joined.rotate(turning)
    words = f"{far} is away: it shakes hands on no tunnel, and the change goes on when it is back"
    await until(lambda: reasons(joined, turning) == (words,), joined.round)
    monkeypatch.undo()
    joined.away.clear()
    joined.hosts[far].run("nft", "delete table inet blocked")
    joined.stages.clear()
    async with talking(streams(joined)) as talks:
        await turn_over(joined, turning, stages(joined))
    assert_none_lost(talks)


@pytest.mark.any_kernel
@TURNING
async def test_a_port_that_is_not_let_through_is_named(joined: Turnovers[LinuxHost], turning: HostId) -> None:
    """That of the device beside: nothing moves, and nothing is lost; when it is let through, the change goes on."""
    joined.hosts[ROME_GATEWAY].run("nft", blocking(str(PORT + 3)))
    words = f"have not shaken hands on mt.beside: is UDP port {PORT + 3} let through between them?"
    async with talking(streams(joined)) as talks:
        joined.rotate(turning)
        await until(lambda: any(words in reason for reason in reasons(joined, turning)), joined.round)
        joined.stages.clear()
        joined.hosts[ROME_GATEWAY].run("nft", "delete table inet blocked")
        await turn_over(joined, turning, stages(joined))
    assert_none_lost(talks)


def reasons(joined: Turnovers[LinuxHost], turning: HostId) -> tuple[str, ...]:
    found = joined.core.allocations.rotations.get(turning)
    return found.reasons if found is not None else ()
