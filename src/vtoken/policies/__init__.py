"""Which tokens may die: one small file a policy. Numpy only, and no word of blocks, pools or pressure."""
