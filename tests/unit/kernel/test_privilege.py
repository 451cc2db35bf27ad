"""Rights as /proc tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kernel.privilege import CAP_NET_ADMIN, CAP_SYS_ADMIN, has_capability


@pytest.mark.parametrize(
    "effective, network, system", [("000001ffffffffff", True, True), ("0000000000001000", True, False), ("0" * 16, False, False)]
)
def test_the_effective_set_counts(tmp_path: Path, effective: str, network: bool, system: bool):
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCapInh:\tffffffffffffffff\nCapEff:\t{effective}\nCapBnd:\tffffffffffffffff\n")
    assert (has_capability(CAP_NET_ADMIN, status), has_capability(CAP_SYS_ADMIN, status)) == (network, system)
