"""Figures: what meshmark costs, measured here and now, beside a floor and, where there is one, a peer. ``python -m benchmarks``.

``figures/`` has one file per figure and lists them; the rest is what figures share. A figure measures and returns `Result`s; it formats
nothing and knows no goal that it did not get from an issue. No figure is written down in code: what is shown was measured in the same run.
"""
