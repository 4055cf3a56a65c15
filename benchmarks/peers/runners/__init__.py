"""One module for each engine family: `python -m benchmarks.peers.runners.<family> spec.json` runs one cell.

A runner lives in the environment of its engine, so it imports the standard library, that engine and this package's
own modules without dependencies, and nothing else.
"""
