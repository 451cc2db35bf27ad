"""Admission: whether an object may join the admitted topology. Pure: an object and the state in, a verdict out.

The established object wins: an object that contradicts an admitted one is refused, and the refusal names both. A refused object is not
forgotten by the service; it is tried again when what it contradicts or misses has changed (``services.planner.core``).

`decide` asks the questions; the other modules have them, one for each kind of object. What is derived from admitted objects, as remaps
and addresses, is chosen elsewhere.
"""

from services.planner.admit.decide import admit, admit_removal, admit_together, overtaken
from services.planner.admit.problem import Problem

__all__ = ["Problem", "admit", "admit_removal", "admit_together", "overtaken"]
