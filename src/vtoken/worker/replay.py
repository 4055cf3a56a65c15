"""`Replays`: small steps without the way through Python.

A step of few tokens makes the same kernel calls each time. They are recorded at the first step of a number of tokens,
compared with a plain run at the second, and replayed from the third on (see `kernels.tape`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vtoken.attention.cpu import CpuAttention
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.rotation import Rotation
from vtoken.kernels.attend import AttendArgs
from vtoken.kernels.tape import Tape
from vtoken.models.base import Attend, CausalLM
from vtoken.models.layers import Linear

logger = logging.getLogger("vtoken")

MOST_TOKENS = 8  # of a step that is recorded: with more, the kernels' own time is what counts


@dataclass(eq=False)
class _Recorded:
    """The calls of one number of tokens, and the tensors that they begin and end with."""

    x: Tensor  # [T, hidden_size]
    rotations: tuple[Rotation, ...]
    slots: Tensor  # [T]
    tape: Tape = field(default_factory=Tape)
    hidden: Tensor | None = None  # [T, hidden_size]; None until recorded
    is_proven: bool = False

    def run(self, x: Tensor, rotations: tuple[Rotation, ...], slots: Tensor, plan: AttendArgs) -> Tensor:
        assert self.hidden is not None
        self.x.copy_(x)
        self.slots.copy_(slots)
        for kept, rotation in zip(self.rotations, rotations, strict=True):
            kept.cos.copy_(rotation.cos)
            kept.sin.copy_(rotation.sin)
        for args in self.tape.args:
            if isinstance(args, AttendArgs):
                args.take_plan(plan)
        missing = self.tape.replay()
        if missing:
            raise MemoryError(f"attention needs {missing} bytes of scratch memory, which the system refuses")
        return self.hidden

    @property
    def slots_read(self) -> int:
        return sum(args.slots_read for args in self.tape.args if isinstance(args, AttendArgs))


class Replays:
    """The layers of a model, recorded for each small number of tokens."""

    def __init__(self, model: CausalLM, backend: CpuAttention) -> None:
        self._model = model
        self._backend = backend
        self._recorded: dict[tuple[int, int], _Recorded] = {}  # by numbers of tokens and of threads
        # Calls of torch's own kernels cannot be recorded.
        linears = [module for module in model.modules() if isinstance(module, Linear)]
        self._is_on = (
            model.is_replayable
            and model.dtype == torch.float32
            and all(linear.prepared is not None and linear.prepared.is_recordable for linear in linears)
        )

    def decode(
        self, x: Tensor, rotations: tuple[Rotation, ...], slots: Tensor, meta: AttentionMetadata, attend: Attend
    ) -> Tensor:
        """What `model.decode(x, attend)` gives, by a replay where there is one.

        `rotations` and `slots` are what `attend` turns by and writes to. The next call overwrites the result.
        """
        num_tokens = x.shape[0]
        if not self._is_on or num_tokens > MOST_TOKENS:
            return self._model.decode(x, attend)
        key = num_tokens, torch.get_num_threads()
        found = self._recorded.get(key)
        if found is None:
            return self._record(key, _Recorded(x, rotations, slots), attend)
        if found.is_proven:
            return self._replay(found, x, rotations, slots, meta)
        if meta.tallies:  # running twice would count twice
            return self._model.decode(x, attend)
        # The plain run comes last: whatever the replay has written to the slots, what stays is right.
        replayed = self._replay(found, x, rotations, slots, meta).clone()
        expected = self._model.decode(x, attend)
        found.is_proven = torch.equal(replayed, expected)
        if not found.is_proven:
            logger.warning("steps cannot be replayed: the model computes something outside of the compiled kernels")
            self._is_on = False
            self._recorded.clear()
        return expected

    def _record(self, key: tuple[int, int], new: _Recorded, attend: Attend) -> Tensor:
        with new.tape.recording():
            new.hidden = self._model.decode(new.x, attend)
        self._recorded[key] = new
        return new.hidden

    def _replay(
        self, found: _Recorded, x: Tensor, rotations: tuple[Rotation, ...], slots: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        hidden = found.run(x, rotations, slots, self._backend.plan_args(meta))
        self._backend.slots_read += found.slots_read
        return hidden
