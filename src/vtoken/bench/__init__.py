"""What reclaim is worth, measured: the real scheduler and books, four arms side by side, the same victims in each.

`vtoken bench reclaim` runs it; `docs/bench.md` says what every figure means.
"""
