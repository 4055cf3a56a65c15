"""Which builds of the compiled kernels this machine can run."""

from __future__ import annotations

from typing import Final

import torch

_WIDEST: Final = {"AVX2": 2, "AVX512": 3}  # how many of the builds below, from the first

ISAS: Final = ["native", *["portable", "avx2", "avx512"][: _WIDEST.get(torch.backends.cpu.get_cpu_capability(), 1)]]
"""Names in `kernels.compiler.ISA_FLAGS`."""
