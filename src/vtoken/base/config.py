"""`EngineConfig`: everything an engine is told at start. Names and meanings are vLLM's where it has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from vtoken.base import host_memory
from vtoken.base.errors import ConfigError
from vtoken.base.kv_format import KV_FORMATS
from vtoken.base.kv_retention import (
    KV_BUDGET_EXPECTED,
    KV_POLICY_EXPECTED,
    KV_PREFILL_STRIDE_EXPECTED,
    KV_STRIDE_EXPECTED,
    KVBudget,
    KVPolicy,
    KVPrefillStride,
    KVStride,
    KVTrigger,
)
from vtoken.base.sampling_params import SEED_EXPECTED, Seed
from vtoken.base.units import format_bytes, parse_bytes
from vtoken.base.validation import Settings, setting

DType = Literal["auto", "float32", "bfloat16", "float16"]
Preemption = Literal["recompute", "swap", "auto"]
KVMode = Literal["native", "naive", "repack", "vtoken"]
KVCopies = Literal["ordered", "beside"]
OnPressure = Literal["evict", "preempt"]
KVCacheDType = Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3", "int8"]

_INT32_MAX = 2**31 - 1  # ids and counts travel as int32
_INT64_MAX = 2**63 - 1
_COUNT = f"a whole number from 1 to {_INT32_MAX}"
_SIZE = "bytes as a whole number, or text such as '512MiB' or '1.5GB'"
_SWITCH = "True or False"
_KV_EXPECTED = f"one of 'auto', {', '.join(map(repr, KV_FORMATS))}"

_Count = Annotated[int, Field(ge=1, le=_INT32_MAX)]
_Bytes = Annotated[int, Field(ge=1, le=_INT64_MAX)]
_Path = Annotated[str, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)]
_parse_size = BeforeValidator(lambda size: parse_bytes(size) if isinstance(size, str) else size)


class EngineConfig(Settings):
    """Settings of one engine, checked as far as they can be without the model.

    Raises ConfigError for a wrong type, a value out of range, an unknown name, settings that contradict each other, and
    more memory than the host has available.
    """

    kind: ClassVar[str] = "engine setting"
    example: ClassVar[str] = "model='smollm2-135m'"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "gpu_memory_utilization": "the KV pool has a size, not a share: set kv_memory='2GiB' or num_blocks",
        "num_gpu_blocks_override": "called num_blocks here",
        "kv_cache_memory_bytes": "called kv_memory here",
        "preemption_mode": "called preemption here",
        **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), "not there yet"),
        **dict.fromkeys(("speculative_config", "enable_lora"), "not there yet"),
    }

    model: _Path = setting(
        "The model: a checkpoint folder, a .gguf file or the name of a model that was got.",
        expected="a checkpoint folder, a .gguf file or a name that `vtoken models list` shows",
        min_length=1,
    )
    tokenizer: _Path | None = setting(
        "Folder of the tokenizer, where it is not the model's own.",
        expected="a folder with a tokenizer, or None (the model's own)",
        default=None,
    )
    skip_tokenizer_init: bool = setting(
        "Run without a tokenizer: prompts are token ids, and answers have no text.", expected=_SWITCH, default=False
    )
    dtype: DType = setting(
        "Type of weights and KV; auto is what this machine computes fast and exactly: float32 on a CPU.",
        expected="one of 'auto', 'float32', 'bfloat16', 'float16'",
        default="auto",
    )
    block_size: int = setting(
        "Tokens in a block, the unit in which KV memory is handed out.",
        expected="a whole number of tokens from 4 to 256",
        default=16,
        ge=4,
        le=256,
    )
    num_blocks: _Count | None = setting(
        "Size of the KV pool in blocks. With neither this nor kv_memory: half of the available memory, at most 4 GiB.",
        expected=f"{_COUNT}, or None",
        default=None,
    )
    kv_memory: Annotated[_Bytes | None, _parse_size] = setting(
        "Size of the KV pool in bytes, such as 512MiB; instead of num_blocks.",
        expected=f"{_SIZE}, or None",
        default=None,
    )
    prefault_kv: bool = setting(
        "Take the memory of the KV pool at start, not page by page as blocks are first written: a slower start, faster "
        "first steps.",
        expected=_SWITCH,
        default=False,
    )
    max_model_len: _Count | Literal["auto"] | None = setting(
        "The most tokens of a sequence, prompt and answer together: the model's own limit if not set, which the pool "
        "must hold; auto: the most that the model and the pool allow.",
        expected=f"{_COUNT}, 'auto' (the most that fits), or None (the model's own)",
        default=None,
    )
    max_num_seqs: _Count = setting("The most sequences in one step.", expected=_COUNT, default=256)
    max_num_batched_tokens: _Count = setting(
        "The most tokens in one step; longer prompts are computed in chunks.", expected=_COUNT, default=2048
    )
    max_logprobs: Annotated[int, Field(ge=0, lt=2**31)] = setting(
        "The most likely tokens that a request may have named beside each of its own.",
        expected="a whole number from 0 up",
        default=20,
    )
    enable_prefix_caching: bool = setting(
        "Keep computed blocks and share them with later prompts that begin the same.", expected=_SWITCH, default=True
    )
    preemption: Preemption = setting(
        "What happens to a paused request's KV: computed again, swapped to host memory, or whichever is quicker.",
        expected="one of 'recompute', 'swap', 'auto'",
        default="recompute",
    )
    swap_space: Annotated[int, Field(ge=0, le=_INT64_MAX), _parse_size] = setting(
        "Host memory for swapped-out blocks, in bytes, such as 1GiB; where it is full, KV is computed again.",
        expected=_SIZE,
        default=0,
    )
    kv_cache_dtype: KVCacheDType = setting(
        "Format of the KV cache. fp8_e4m3 and int8, with a scale for each token and head, take about a quarter of "
        "float32's memory; auto is the model's dtype.",
        expected=_KV_EXPECTED,
        default="auto",
    )
    key_cache_dtype: KVCacheDType | None = setting(
        "Format of the keys, where it is not that of the values.", expected=f"{_KV_EXPECTED}, or None", default=None
    )
    value_cache_dtype: KVCacheDType | None = setting(
        "Format of the values, where it is not that of the keys.", expected=f"{_KV_EXPECTED}, or None", default=None
    )
    kv_policy: KVPolicy | None = setting(
        "Which tokens may die: a policy's name, with parameters as in 'h2o:recent=64', or a Policy; needs kv_budget.",
        expected=KV_POLICY_EXPECTED,
        default=None,
    )
    kv_budget: KVBudget | None = setting(
        "Tokens of a sequence that are safe: a number, or as a decimal fraction a share of its text. Under pressure "
        "more stay as long as there is room; with kv_trigger='always' the rest dies at its places. Needs kv_policy.",
        expected=KV_BUDGET_EXPECTED,
        default=None,
    )
    kv_trigger: KVTrigger = setting(
        "When tokens die: under pressure, only when blocks are short; always, at fixed places of the text, whatever "
        "else runs.",
        expected="'pressure' or 'always'",
        default="pressure",
    )
    kv_stride: KVStride | None = setting(
        "Tokens from one eviction to the next while an answer grows; without it the policy's own, or a block.",
        expected=KV_STRIDE_EXPECTED,
        default=None,
    )
    kv_prefill_stride: KVPrefillStride | None = setting(
        "The same for a prompt that is longer than its budget; 0: once, at its end; without it the policy's own. "
        "Budget and stride together are what a prompt longer than the pool needs room for.",
        expected=KV_PREFILL_STRIDE_EXPECTED,
        default=None,
    )
    kv_mode: KVMode = setting(
        "What becomes of the memory of dead tokens: vtoken uses it again and packs what lives; naive and repack are "
        "for comparison (no reuse, without and with packing), native evicts nothing.",
        expected="one of 'native', 'naive', 'repack', 'vtoken'",
        default="vtoken",
    )
    kv_copies: KVCopies = setting(
        "When survivors are packed: ordered, before a step, or beside the steps, on a thread of its own.",
        expected="'ordered' or 'beside'",
        default="ordered",
    )
    on_pressure: OnPressure = setting(
        "What comes first when blocks are short and nothing is left to reclaim: evict down to the budgets, or preempt.",
        expected="'evict' or 'preempt'",
        default="evict",
    )
    admission_evicts: bool = setting(
        "Whether running requests lose tokens, down to their budgets, to let in one that waits.",
        expected=_SWITCH,
        default=True,
    )
    attention_backend: str = setting(
        "What computes attention: cpu is compiled for this machine on first use, reference is plain torch, in which no "
        "neighbour can change a bit of an answer; auto is cpu where there is a C++ compiler, else reference.",
        expected="'auto', 'cpu' or 'reference'",
        default="auto",
        min_length=1,
    )
    linear_backend: str = setting(
        "What multiplies by the weights; auto is the quickest kernel on this machine that keeps every weight exactly, "
        "measured once for each shape.",
        expected="'auto' or the name of a linear backend",
        default="auto",
        min_length=1,
    )
    quantization: Literal["int8"] | None = setting(
        "Hold the weights in fewer bits: int8 is smaller and faster, and changes results slightly.",
        expected="'int8' or None",
        default=None,
    )
    seed: Seed | None = setting(
        "Seeds the requests that bring no seed of their own; without it they differ from run to run.",
        expected=SEED_EXPECTED,
        default=None,
    )

    @classmethod
    def refuse(cls, message: str, field: str | None) -> ConfigError:
        return ConfigError(message)

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and kv_memory={self.kv_memory} both set the size of the KV pool; "
                "give one of them, or none"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}, but "
                "each running sequence needs a token of the step; raise the one or lower the other"
            )
        if self.swap_space and self.preemption == "recompute":
            raise ValueError(
                f"swap_space={self.swap_space} would never be used with preemption='recompute'; set preemption to "
                "'swap' or 'auto', or leave swap_space out"
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ValueError(f"tokenizer={self.tokenizer!r} contradicts skip_tokenizer_init=True; give one of them")
        return self

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        asked = {name: size for name in ("kv_memory", "swap_space") if (size := getattr(self, name))}
        if asked and sum(asked.values()) > (available := host_memory.available_bytes()):
            what = " and ".join(f"{name}={size} ({format_bytes(size)})" for name, size in asked.items())
            raise ValueError(
                f"{what} asked for, but this host has {available} bytes ({format_bytes(available)}) of memory "
                "available; ask for less"
            )
        return self
