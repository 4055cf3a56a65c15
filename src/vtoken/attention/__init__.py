"""Attention over the paged KV cache. No torch in here, so that reading a checkpoint's config does not import it."""
