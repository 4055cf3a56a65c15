"""The picture of the README on the real books: nine tokens, five of them evicted, three blocks brought down to one."""

from __future__ import annotations

import numpy as np

from vtoken.memory.kv_cache_manager import KVCacheManager

# The order of free blocks is chosen so that the text gets blocks 7, 2 and 5, as in the picture.
books = KVCacheManager(num_blocks=8, block_size=4, free_order=[7, 2, 5, 0, 1, 3, 4, 6])
lane = books.admit(num_tokens=9)
books.extend(books.plan_extend(np.array([lane]), np.array([9])))


def show(what: str) -> None:
    held = ", ".join(f"block {state.block} ({state.filled} live)" for state in books.table(lane))
    print(f"{what:9} {held}; {books.usage().free_blocks} blocks free")


show("extend:")
dead = np.array([0, 2, 3, 4, 6])
books.evict(np.full(len(dead), lane), dead)
show("evict:")
found = books.reclaim([lane])
show("reclaim:")
[(_, copy)] = found.copies
print(f"{found.num_blocks} blocks came back for {len(copy)} copies, slots {copy.src.tolist()} to {copy.dst.tolist()}")
