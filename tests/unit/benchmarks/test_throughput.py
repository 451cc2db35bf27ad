"""Throughput: the hosts by hand have a place in the lab, and rounds come to milliseconds for a MiB."""

from __future__ import annotations

import pytest

from benchmarks.figures.throughput import _site, _summed_up
from schemas.values import Prefix
from services.cli.lab.layout import layout


def test_what_is_set_up_by_hand_has_a_place_beside_the_lab() -> None:
    """Every host and pod, by names and addresses that no example has."""
    sites = _site("left", 101), _site("right", 102, nodes=2)
    placed = layout([item for site in sites for item in site.objects()])
    assert placed.unplaced == ()
    assert set(placed.hosts) == {
        "mm.left.gateway",
        "mm.left.worker-1",
        *(f"mm.right.{name}" for name in ("gateway", "worker-1", "worker-2")),
    }
    assert set(placed.pods) == {"mm.left.pod.pod-worker-1", "mm.right.pod.pod-worker-1", "mm.right.pod.pod-worker-2"}
    assert sites[1].node_prefix("worker-2") == Prefix("10.102.2.0/24")


def test_rounds_come_to_milliseconds_for_a_mebibyte() -> None:
    """And the ratio is that of both in one round, whatever the machine did in another one."""
    found = _summed_up("throughput", [(1.0, 0.5), (4.0, 2.0), (1.0, 0.5)], 10 << 20)
    assert (found.median, found.peer) == (100.0, 50.0)
    assert found.details["time over that by hand, same round"] == {"median": 2.0, "from": 2.0, "to": 2.0}
    assert found.details["Mbit/s"] == pytest.approx(83.89)
