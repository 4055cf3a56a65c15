"""Threads that OpenMP keeps: an engine in a thread of its own must not share the cores with idle ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

# torch is found first as in a program that uses vtoken; each thread that runs in parallel gets one helper.
PROGRAM = """
import ctypes, os, sys, time, psutil
from vtoken.engine.openmp import give_back_threads
give_back_threads()  # nothing is there: no error
import torch
try:
    ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
except OSError:
    sys.exit(3)
torch.set_num_threads(2)
def num_threads(): return psutil.Process().num_threads()
def settles_at(count):
    for _ in range(200):
        if num_threads() == count: return True
        time.sleep(0.01)
    return False
before = num_threads()
numbers = torch.ones(1_000_000)
total = numbers.exp().sum()
assert settles_at(before + 1), "no helper came"
give_back_threads()
assert settles_at(before), "the helper stayed"
assert numbers.exp().sum() == total and settles_at(before + 1), "it did not come again"
assert torch.get_num_threads() == 2
"""


def test_helpers_go_and_come_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 3:
        pytest.skip("torch uses another OpenMP here")
    assert done.returncode == 0, done.stderr
