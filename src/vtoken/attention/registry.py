"""Attention backends by name."""

from __future__ import annotations

from vtoken.attention.base import AttentionBackend
from vtoken.attention.cpu import CpuAttention
from vtoken.attention.reference import ReferenceAttention
from vtoken.base.registry import Registry

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend")
BACKENDS.register("reference")(ReferenceAttention)
BACKENDS.register("cpu")(CpuAttention)
