"""Kernels in C++, compiled for the very machine on first use."""
