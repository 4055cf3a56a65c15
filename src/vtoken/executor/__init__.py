"""Where plans are carried out: on this machine, or in a simulation."""
