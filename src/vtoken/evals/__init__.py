"""What eviction costs in quality, measured: tasks with known answers, run under each policy, budget and KV format.

`vtoken eval` runs it; `docs/eval.md` says what each task measures, and what it does not.
"""
