"""The face: requests in, answers out."""

import os

# Threads that wait for each other spin for as long as OpenMP is told to. For long is a disaster beside other busy
# processes: with four of those on two cores a step took 4.7 s spinning and 0.5 s sleeping. Not at all means that each
# of the hundreds of parallel regions of a step begins by waking a sleeper: a lone sequence got 71 tokens a second, and
# 103 when threads spin for some microseconds. OpenMP reads this once, when torch is loaded; whoever loads torch first,
# or has set it already, is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
