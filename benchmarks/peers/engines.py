"""The engines that are compared, each with the settings that serve it best on a machine like this one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from benchmarks.peers.workloads import KV_GIB

Family = Literal["vtoken", "vllm", "llama.cpp", "transformers"]


@dataclass(frozen=True)
class Engine:
    """One row of the tables: an engine family with its settings.

    `precision` says how weights, KV and maths are held. `settings` go to the engine itself, `env` to its process
    ({threads} and {peers} are filled in). `information`: not in a target, so by default it runs once.
    """

    name: str
    family: Family
    precision: str
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    information: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# vLLM reserves one core for its scheduler when it binds threads by itself, half of a machine with two. In one process,
# with Intel's OpenMP and tcmalloc as its documentation advises, it uses them all and is faster than with the engine
# core in a process apart.
_VLLM_ENV: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "{threads}",
    "LD_PRELOAD": "{peers}/tcmalloc/libtcmalloc_minimal.so.4:{peers}/vllm/venv/lib/libiomp5.so",
    "KMP_BLOCKTIME": "5",  # what vLLM sets itself where it starts the worker
}


def _vllm(name: str, precision: str, *, dtype: str, eager: bool, zentorch: bool, information: bool = False) -> Engine:
    settings = {"dtype": dtype, "enforce_eager": eager, "zentorch": zentorch}
    return Engine(name, "vllm", precision, settings, _VLLM_ENV, information)


# Flash attention and llama.cpp's own float16 KV and batch sizes were the quickest here, long prompts and short.
def _llama(name: str, precision: str, weights: str, *, kv: str = "f16", information: bool = False) -> Engine:
    flags = {"--flash-attn": "on", "--cache-type-k": kv, "--cache-type-v": kv}
    return Engine(name, "llama.cpp", precision, {"weights": weights, "flags": flags}, {}, information)


ENGINES: Final = {
    each.name: each
    for each in (
        Engine("vtoken", "vtoken", "checkpoint's weights, float32 maths and KV"),
        Engine("vtoken-int8", "vtoken", "int8 weights, float32 KV", {"quantization": "int8"}),
        Engine("vtoken-kv-int8", "vtoken", "float32 maths, int8 KV", {"kv_cache_dtype": "int8"}),
        _vllm("vllm-eager", "float32", dtype="float32", eager=True, zentorch=False),
        _vllm("vllm-compiled", "float32", dtype="float32", eager=False, zentorch=False),
        _vllm("vllm-zen", "float32, AMD's kernels", dtype="float32", eager=True, zentorch=True),
        _vllm("vllm-bf16", "bfloat16", dtype="bfloat16", eager=True, zentorch=False, information=True),
        _llama("llama-f32", "float32 weights, float16 KV", "f32"),
        _llama("llama-f32-kv32", "float32 weights and KV", "f32", kv="f32"),
        _llama("llama-f16", "float16 weights and KV, float32 sums", "f16"),
        _llama("llama-q8_0", "8-bit weights, float16 KV", "q8_0"),
        _llama("llama-bf16", "bfloat16 weights, float16 KV", "bf16", information=True),
        Engine("transformers", "transformers", "float32", {"dtype": "float32"}, information=True),
    )
}


@dataclass(frozen=True)
class Target:
    """`ours` must be `factor` times as fast as the best of `peers` in one figure of a workload."""

    workload: str
    ours: str
    peers: tuple[str, ...]
    factor: float


VLLM_FLOAT32: Final = ("vllm-eager", "vllm-compiled", "vllm-zen")
LLAMA_FLOAT32: Final = ("llama-f32", "llama-f32-kv32")
TARGETS: Final = (
    Target("W1", "vtoken", VLLM_FLOAT32, 1.6),
    Target("W2", "vtoken", VLLM_FLOAT32, 1.5),
    Target("W3", "vtoken", VLLM_FLOAT32, 2.5),
    Target("W4", "vtoken", VLLM_FLOAT32, 1.4),
    Target("W1", "vtoken", LLAMA_FLOAT32, 1.5),
    Target("W1", "vtoken", ("llama-f16",), 1.5),
    Target("W3", "vtoken", LLAMA_FLOAT32, 1.0),
    Target("W3", "vtoken", ("llama-f16",), 1.0),
    Target("W1", "vtoken-int8", VLLM_FLOAT32, 2.0),
    Target("W3", "vtoken-int8", ("llama-q8_0",), 1.0),
    Target("W2", "vtoken-kv-int8", ("vtoken",), 1.3),
)
