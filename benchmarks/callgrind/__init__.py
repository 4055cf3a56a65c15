"""Counts instructions: what the token-level machinery costs a decode step in which nothing was evicted.

    python -m benchmarks.callgrind

See `__main__.py` for what is compared with what.
"""
