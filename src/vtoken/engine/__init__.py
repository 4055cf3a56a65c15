"""The face: requests in, answers out."""

import os

# Threads of torch that wait for each other spin unless told to sleep. Beside other busy processes that is a disaster:
# with four of those on two cores a step took 4.7 s spinning and 0.5 s sleeping. OpenMP reads this once, when torch is
# loaded; whoever loads torch first, or has set it already, is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
