"""Attention over the paged KV cache. Kept free of torch, since planners import `attention.spec`."""
