"""Architecture name in `config.json` -> the class that serves it. Import paths, so that listing them costs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vtoken.models.base import CausalLM

_CLASSES: Final = {
    "LlamaForCausalLM": "vtoken.models.llama:Llama",
    "MistralForCausalLM": "vtoken.models.llama:Llama",
    "GPT2LMHeadModel": "vtoken.models.gpt2:GPT2",
    "OPTForCausalLM": "vtoken.models.opt:OPT",
    "Gemma2ForCausalLM": "vtoken.models.gemma:Gemma",
    "Gemma3ForCausalLM": "vtoken.models.gemma:Gemma",
    "Gemma3ForConditionalGeneration": "vtoken.models.gemma:Gemma",
    "Phi3ForCausalLM": "vtoken.models.phi3:Phi3",
    "Qwen2ForCausalLM": "vtoken.models.qwen:Qwen2",
    "Qwen3ForCausalLM": "vtoken.models.qwen:Qwen3",
}


def supported_architectures() -> tuple[str, ...]:
    """The names that `config.json` may hold under `architectures`."""
    return tuple(_CLASSES)


def model_class(architecture: str) -> type[CausalLM]:
    """Import the class of a supported architecture."""
    module, _, name = _CLASSES[architecture].partition(":")
    found: type[CausalLM] = getattr(import_module(module), name)
    return found
