"""Linear layers: kernels behind one interface, the best one chosen per shape by measuring on this machine.

shape = shape_of(weight, bias)                 # in, out, dtype, and how the weight can be held without any loss
plan = choose([shape], override="auto")     # measured once a machine, then read from the cache
linear = plan.prepare(weight, bias, shape)     # packed; the weight itself may be freed if `linear` does not keep it
y = linear(x)                                  # [T, in] -> [T, out]
"""

from vtoken.linear.base import LinearKernel, LinearShape, PreparedLinear
from vtoken.linear.choose import LinearPlan, choose
from vtoken.linear.holding import shape_of
from vtoken.linear.registry import BACKENDS, KERNELS, QUANTIZATIONS

__all__ = [
    "BACKENDS",
    "KERNELS",
    "QUANTIZATIONS",
    "LinearKernel",
    "LinearPlan",
    "LinearShape",
    "PreparedLinear",
    "choose",
    "shape_of",
]
