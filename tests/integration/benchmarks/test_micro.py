"""pyperf runs the parts in processes of its own, and what a reader is given there reads as the kernel's own dump does."""

from __future__ import annotations

import pytest

from benchmarks.bare_netlink import in_new_network
from benchmarks.figures import micro
from benchmarks.figures.nft_reading import plan
from benchmarks.kept_dump import KeptDumps, answers_of
from benchmarks.micro import PARTS
from services.kernel.linux import LinuxKernel
from services.kernel.nftread.dumps import Dumps
from services.kernel.nftread.reading import Reading
from services.kernel.transaction import Change


@pytest.mark.privileged
def test_a_kept_dump_reads_as_the_kernels(tmp_path):
    objects = plan(5_000).objects()

    def read():
        kernel, dumps = LinuxKernel(tmp_path), Dumps()
        kernel.commit([Change(None, item) for item in objects.values()], None)
        found = Reading(dumps, remembers=False).read(objects)
        dumps.close()
        kernel.close()
        return found

    real, kept = in_new_network(read), Reading(KeptDumps(answers_of(objects)), remembers=False).read(objects)
    assert kept == real


@pytest.mark.slow
def test_every_part_is_timed_by_pyperf():
    found = micro.summed_up(micro.timed(("--processes=1", "--values=2", "--warmups=1", "--loops=1", "--quiet")))
    assert [item.name for item in found] == [f"micro-{part.name}" for part in PARTS]
    assert all(item.median > 0 for item in found)
