"""Numbers in fewer bits: how they are written and read back, in plain torch. The kernels are held to it."""
