"""Which of a flow's packets and points the filters show, over what real hosts told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.auditor.trace.carriers import seconds
from services.cli.trace.command import trace
from services.cli.trace.filters import Filters, span_s
from tests.unit.auditor.trace.test_recorded import told
from tests.unit.cli.broker import StubBroker
from tests.unit.cli.trace.said import shown


@pytest.mark.parametrize(
    "filters,lines",
    [
        (Filters(), 14),
        (Filters(first=1), 7),
        (Filters(last=1), 7),
        (Filters(since="1s"), 14),
        (Filters(node=["rome/worker-2"]), 7),
        (Filters(ip=["172.18.0.11"]), 4),
        (Filters(ip=["172.18.0.11/32"]), 4),
        (Filters(ip=["172.18.0.0/16"]), 4),
        (Filters(ip=["10.200.2.0/24"]), 10),
        (Filters(ip=["10.200.2.0/24", "172.18.0.0/16"]), 14),
        (Filters(ip=["192.0.2.0/24", "fd00::/8"]), 0),
        (Filters(verdict="DROPPED"), 0),
        (Filters(verdict="FORWARDED"), 14),
        (Filters(protocol=["icmp"]), 14),
        (Filters(protocol=["tcp"]), 0),
        (Filters(port=[443]), 0),
    ],
)
async def test_filters_are_named_as_hubbles(mesh: StubBroker, recorded, capsys, filters: Filters, lines: int):
    """Whole packets by what they are, and points by host, address and verdict."""
    _, out = await shown(capsys, mesh, recorded["native"], filters=filters)
    assert sum("]: " in line for line in out.splitlines()) == lines


def test_the_last_while_is_that_before_the_newest_event_of_all() -> None:
    """Also of one that is not shown; a packet counts from when it was first seen."""
    wanted, events = told("native")
    request, answer = wanted.trails(events)
    end_s = seconds(answer.seen[0])
    assert seconds(request.seen[0]) < end_s
    assert Filters(since="2s").recent([request, answer], end_s + 2) == [answer]
    assert Filters(since="3s").recent([request, answer], end_s + 2) == [request, answer]
    assert Filters(since="1s").recent([request, answer], end_s + 2) == []
    assert Filters().recent([request, answer], end_s + 1e6) == [request, answer]


@pytest.mark.parametrize("text", ["FD00:200:0:2::10", "fd00:0200:0000:0002:0:0:0:10", "fd00:200:0:2::/64", " fd00::/8 "])
def test_an_address_may_be_spelled_in_any_way(text: str) -> None:
    """In capitals, with its zeros, as a prefix; a host's spelling does not count either, and what is no address is in no prefix."""
    _, (event, *_) = told("native")
    assert event.ip is not None
    told_so, other, none = (
        replace(event, ip=replace(event.ip, source="192.0.2.1", destination=found))
        for found in ("fd00:200:0:2:0::10", "fe00::1", "nowhere")
    )
    chosen = Filters(ip=[text]).points(("forward", each) for each in (told_so, other, none))
    assert [each for _, each in chosen] == [told_so]


async def test_a_host_may_be_named_without_the_cluster_that_is_given(mesh: StubBroker, recorded, capsys):
    """As ends may; and of a recording, hosts count that it has, whatever is on the way by now."""
    options = {"cluster": "rome", "source": "shop", "destination": "stock"}
    _, out = await shown(capsys, mesh, recorded["native"], filters=Filters(node=["worker-2"]), **options)
    assert sum("]: " in line for line in out.splitlines()) == 7
    recorded["native"].write_text(recorded["native"].read_text().replace("rome/worker-2", "rome/worker-7"))
    _, out = await shown(capsys, mesh, recorded["native"], filters=Filters(node=["rome/worker-7"]))
    assert sum("[rome/worker-7]: " in line for line in out.splitlines()) == 7


async def test_packets_that_the_filters_leave_out_were_seen(mesh: StubBroker, recorded, capsys):
    """Whoever asks for what is in clear, and gets none, is told that something was looked at: that is fine."""
    options = {"source": "rome/shop", "destination": "rome/stock", "filters": Filters(unencrypted=True), "output": "json"}
    assert await trace(**options, input_file=recorded["native"], nats=mesh) == 0  # type: ignore[arg-type]
    assert "2 packets of the flow were seen, none of those that the filters choose" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["compact", "table", "json"])
async def test_packets_of_which_no_point_is_shown_were_seen(mesh: StubBroker, recorded, capsys, form: str):
    """An address that none of them has looks like a quiet flow otherwise."""
    options = {"source": "rome/shop", "destination": "rome/stock", "output": form}
    said = "2 packets of the flow were seen, at no point that --node, --ip and --verdict choose"
    for address, is_said in (("192.0.2.99", True), ("10.200.1.10", False)):
        assert await trace(**options, filters=Filters(ip=[address]), input_file=recorded["native"], nats=mesh) == 0  # type: ignore[arg-type]
        assert (said in capsys.readouterr().err) == is_said


def test_spans_of_time():
    assert [span_s(text) for text in ("30s", "5m", "500ms", "2", "1h")] == [30, 300, 0.5, 2, 3600]
