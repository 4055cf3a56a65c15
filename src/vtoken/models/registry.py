"""Architecture name in `config.json` -> the class that serves it: ours, and those of installed packages under the entry
point group `vtoken.models`. Import paths, so that listing them costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from vtoken.base.entry_points import find_entry_points, load_class
from vtoken.base.errors import CheckpointError

if TYPE_CHECKING:
    from vtoken.models.base import CausalLM

GROUP: Final = "vtoken.models"

BUILT_IN: Final = {
    "LlamaForCausalLM": "vtoken.models.llama:Llama",
    "MistralForCausalLM": "vtoken.models.llama:Llama",
    "GPT2LMHeadModel": "vtoken.models.gpt2:GPT2",
    "OPTForCausalLM": "vtoken.models.opt:OPT",
    "Gemma2ForCausalLM": "vtoken.models.gemma:Gemma",
    "Gemma3ForCausalLM": "vtoken.models.gemma:Gemma",
    "Gemma3ForConditionalGeneration": "vtoken.models.gemma:Gemma",
    "MixtralForCausalLM": "vtoken.models.mixtral:Mixtral",
    "Phi3ForCausalLM": "vtoken.models.phi3:Phi3",
    "Qwen2ForCausalLM": "vtoken.models.qwen:Qwen2",
    "Qwen3ForCausalLM": "vtoken.models.qwen:Qwen3",
    "Qwen3MoeForCausalLM": "vtoken.models.qwen:Qwen3Moe",
}


def supported_architectures() -> tuple[str, ...]:
    """The names that `config.json` may hold under `architectures` and that have a family: ours first."""
    points, _ = find_entry_points(GROUP)
    return (*BUILT_IN, *sorted({point.name for point in points} - BUILT_IN.keys()))


def model_class(architecture: str) -> type[CausalLM]:
    """Import the class of a supported architecture. Raises CheckpointError where what a package offers is of no use."""
    if architecture in BUILT_IN:
        module, _, name = BUILT_IN[architecture].partition(":")
        found: type[CausalLM] = getattr(import_module(module), name)
        return found
    return _third_party(architecture)


def _third_party(architecture: str) -> type[CausalLM]:
    from vtoken.models.base import CausalLM  # here, for the sake of who only lists

    points = [point for point in find_entry_points(GROUP)[0] if point.name == architecture]
    if not points:
        raise CheckpointError(f"a class for {architecture} is not there any more")
    return load_class(points, CausalLM, architecture, CheckpointError)  # type: ignore[type-abstract]
