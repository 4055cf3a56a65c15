"""Settings that every test runs under."""

from __future__ import annotations

import os

# Nothing here may reach for the network, whatever a library would like to look up.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# As `vtoken.engine` does, for tests that load torch before it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tiny models gain nothing from threads, and on a busy machine threads that wait for each other lose a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# No deadline: wall-clock times of a shared machine prove nothing. A failure prints how to repeat it.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
