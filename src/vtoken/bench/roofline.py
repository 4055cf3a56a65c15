"""`Roofline`: how long a step would take on a device, from what it has to move and to multiply.

Both count, and the longer one is the step's time: bytes over bandwidth, floating-point operations over peak. Copies
that the plan orders run before the forward pass and are added. What the host does is measured, and no part of it.

The same rule holds for every arm. KV is counted by live token, since our kernels skip dead cells, so an arm that leaves
holes reads no more for it: what it loses is room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from vtoken.bench.devices import Device
from vtoken.bench.shapes import ModelShape
from vtoken.memory.copy import CopyKind
from vtoken.policies.statistics import AttentionStatistic
from vtoken.schedule.plan import StepPlan

MEMORY_EFFICIENCY: Final = 0.8  # of the peak, as large streaming reads reach it
COMPUTE_EFFICIENCY: Final = 0.6  # of the peak, as large matrix products reach it
_STATISTIC_BYTES: Final = 8  # a float32 a layer and live token, read and written


@dataclass(frozen=True)
class StepSeconds:
    """Simulated time of one step."""

    forward: float
    copies: float

    @property
    def total(self) -> float:
        return self.forward + self.copies


class Roofline:
    """Times plans for one model shape on one device."""

    def __init__(self, shape: ModelShape, device: Device) -> None:
        self.shape = shape
        self._flops = device.flops_per_second * COMPUTE_EFFICIENCY
        self._bandwidth = device.bytes_per_second * MEMORY_EFFICIENCY
        self._link = device.link_bytes_per_second * MEMORY_EFFICIENCY
        self._token_bytes = shape.kv.bytes_per_token

    def seconds(self, plan: StepPlan) -> StepSeconds:
        """What the plan takes, its copies apart."""
        return StepSeconds(self._forward(plan), self._copies(plan))

    def _forward(self, plan: StepPlan) -> float:
        counts, past = np.diff(plan.starts).astype(np.int64), plan.past_live.astype(np.int64)
        num_tokens = plan.num_tokens
        pairs = int((counts * past + counts * (counts + 1) // 2).sum())
        flops = self.shape.flops_per_token * num_tokens + self.shape.flops_per_pair * pairs
        # A chunk's queries share one reading of their past; each new token is written once.
        moved = self.shape.weight_bytes + self._token_bytes * (int(past.sum()) + num_tokens)
        for order in plan.statistics:
            if isinstance(order.statistic, AttentionStatistic):
                moved += _STATISTIC_BYTES * self.shape.num_layers * int((past + counts)[order.slices].sum())
        return max(flops / self._flops, moved / self._bandwidth)

    def _copies(self, plan: StepPlan) -> float:
        seconds = 0.0
        for copy in plan.copies:
            num_bytes = len(copy) * self._token_bytes
            if copy.kind in (CopyKind.SWAP_IN, CopyKind.SWAP_OUT):
                seconds += num_bytes / self._link
            elif copy.ticket is None:  # one beside the steps takes none of their time
                seconds += 2 * num_bytes / self._bandwidth  # read and written
        return seconds
