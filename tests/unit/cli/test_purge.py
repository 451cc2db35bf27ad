"""``meshmark purge`` without a kernel: what is ours, what is left, and how that is told."""

from __future__ import annotations

import time

import pytest

from schemas.host_objects import NftTable
from services.applier.core import Applier
from services.cli.purge import Purged, _show, held, remove
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Change
from services.runtime.errors import Permanent
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters

PLAN = settled_plans([*two_clusters(), *keys()])[ROME_GATEWAY]


@pytest.fixture
def host() -> FakeHost:
    made = FakeHost(foreign={"table other": NftTable("other")})
    Applier(FakeKernel(made), time.time).apply(PLAN, 1, 1)
    return made


def test_all_that_is_ours_is_held_and_goes(host: FakeHost):
    """By layer, the marker last; what is somebody else's is neither named nor touched."""
    kernel = FakeKernel(host)
    found = held(kernel)
    assert set(found) == {*(key for key in PLAN.objects() if not key.startswith("sysctl")), *_changed(host), "table meshmark.marker"}
    assert remove(kernel, found) == Purged(dry_run=False, removed=found)
    assert held(kernel) == ()
    assert host.foreign.keys() == {"table other"}


def test_what_cannot_go_is_told_and_the_rest_goes(host: FakeHost, capsys):
    def fail(change: Change) -> Exception | None:
        return Permanent("device is busy") if change.key == "link mt.1" else None

    kernel = FakeKernel(host, fail)
    result = remove(kernel, held(kernel))
    assert (result.left, result.error) == (("link mt.1",), "link mt.1: device is busy")
    assert _show(result, "table") == 1
    said = capsys.readouterr()
    assert "removed link mt.0\n" in said.out
    assert said.err == "error: 1 object could not be removed (link mt.1): link mt.1: device is busy\n"


def _changed(host: FakeHost) -> set[str]:
    return {f"sysctl {name}" for name in host.kept_sysctls}
