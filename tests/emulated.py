"""How much is tried by chance where the kernel is emulated."""

from __future__ import annotations

import os

from tests.real_kernel.report import RESULTS_VARIABLE


def examples(count: int) -> int:
    """So many examples of a property, but a tenth, two at least, in an emulated machine, which needs twenty times as long for each."""
    return max(2, count // 10) if RESULTS_VARIABLE in os.environ else count
