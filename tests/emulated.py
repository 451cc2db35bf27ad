"""What differs where the kernel is emulated: how much is tried by chance, and that seconds pass for what else takes milliseconds."""

from __future__ import annotations

import os

from tests.real_kernel.report import RESULTS_VARIABLE

IS_EMULATED = RESULTS_VARIABLE in os.environ


def examples(count: int) -> int:
    """So many examples of a property, but a tenth, two at least, in an emulated machine, which needs twenty times as long for each."""
    return max(2, count // 10) if IS_EMULATED else count
