"""In which formats keys and values can lie in the cache, and what each costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SCALE_BYTES: Final = 4  # a float32


@dataclass(frozen=True)
class KVFormat:
    """One format. Those with scales keep a float32 for each token and head beside the token's slot."""

    name: str
    code: int  # its number in the C++ kernels, `kv_format.h`
    bytes_per_element: int
    has_scales: bool = False

    def bytes_per_head(self, head_dim: int) -> int:
        """Bytes of one token's key, or value, in one head of one layer, its scale included."""
        return head_dim * self.bytes_per_element + (SCALE_BYTES if self.has_scales else 0)


KV_FORMATS: Final = {
    form.name: form
    for form in (
        KVFormat("float32", 0, 4),
        KVFormat("float16", 1, 2),
        KVFormat("bfloat16", 2, 2),
        KVFormat("fp8_e4m3", 3, 1, has_scales=True),
        KVFormat("int8", 4, 1, has_scales=True),
    )
}
