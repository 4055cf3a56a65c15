"""`give_back_threads`: OpenMP keeps the threads of whoever once ran something in parallel, for a next time."""

from __future__ import annotations

import ctypes
import os

_SOFT = 1  # omp_pause_soft: threads go, settings stay


def give_back_threads() -> None:
    """Let the calling thread's idle helpers go; they come again when it next runs something in parallel.

    GCC's OpenMP counts the helpers of all threads together, and where they are more than the cores it puts waiting ones
    to sleep at once, whatever `GOMP_SPINCOUNT` says. An engine in a thread of its own, beside those who had loaded the
    model in another, made 426 tokens a second on two cores, and 623 without them.
    """
    try:
        # Not to be loaded, which would be another library than torch's: only to be found where torch uses it.
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        pause = library.omp_pause_resource_all
    except (OSError, AttributeError):  # another OpenMP, or one from before 2018
        return
    pause(_SOFT)
