"""Eviction here beside NVIDIA's kvpress: the same model, texts and number of kept tokens.

    python -m benchmarks.kvpress

README.md in this folder says what is compared, and what differs.
"""
