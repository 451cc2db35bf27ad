"""A trace by the command in a lab with all its services, of which one is killed, or whose host starts anew, in the middle of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from schemas.host_objects import TRACE_TABLE
from tests.lab.conftest import EXAMPLES, Mesh, connected, up
from tests.lab.test_reports import WIPE

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.timeout(300)]

HOST = "rome.worker-1"
SECONDS = 10
ANEW = "host started anew"
MESH_LINKS = "for link in me.0 mm.4 mm.6; do ip link delete $link 2>&-; done; true"


@pytest.fixture(scope="module")
def rome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with up(EXAMPLES / "encryption.yaml", tmp_path_factory.mktemp("trace") / "state") as found:
        yield found


def is_traced(rome: Mesh) -> bool:
    """Whether the host's kernel holds anything for a trace."""
    return TRACE_TABLE in rome.run(HOST, "nft", "list", "tables")


@pytest.mark.parametrize("what", ["nothing", "applier killed", "auditor killed", ANEW])
async def test_what_happens_in_the_middle_of_a_trace_leaves_nothing_behind(rome: Mesh, what: str) -> None:
    """The flow is told of as encrypted, both ways, before or after; when the time is over, the kernel is as it was, which was no drift."""
    async with connected(rome) as live:
        await live.carries()
        await live.eventually(lambda: not is_traced(rome), "the trace before is over")
        before, told = sorted(rome.own_state(HOST)), len(live.board.drift)
        async with live.traffic("rome/shop", "rome/stock"):
            asked = ("trace", "--from", "rome/shop", "--to", "rome/stock", "--for", f"{SECONDS}s", "--output", "json")
            tracing = asyncio.create_task(live.meshmark(*asked))
            await live.eventually(lambda: is_traced(rome), "the host was asked")
            if what == ANEW:
                rome.run(HOST, "sh", "-c", f"{WIPE}{MESH_LINKS}")
            for service in {"nothing": (), ANEW: ("applier", "auditor")}.get(what, (what.partition(" ")[0],)):
                await rome.kill(f"{service}.{HOST}")
            done = await tracing
        # A host that has lost all its rules sends in clear until it has them again, which is told if it can be told by then.
        assert done.returncode in ((0, 2) if what == ANEW else (0,)), done.stderr
        flows = [json.loads(line)["flow"] for line in done.stdout.splitlines()]
        # What it was asked for is gone with the applier, or with the host: it tells no more of this trace.
        asked_once = {"rome/worker-1"} if what in (ANEW, "applier killed") else set()
        assert {flow["node_name"] for flow in flows} | asked_once == {"rome/worker-1", "rome/worker-2"}
        # Of a busy flow the hosts tell of some packets, and not both of the same ones.
        verdicts = {flow["encryption"] for flow in flows}
        assert "encrypted" in verdicts
        assert what == ANEW or verdicts <= {"encrypted", "unknown"}
        await live.eventually(lambda: sorted(rome.own_state(HOST)) == before, "all is as before, and nothing is there for a trace")
        if what != ANEW:
            assert [event for event in live.board.drift[told:] if TRACE_TABLE in event.key] == []
