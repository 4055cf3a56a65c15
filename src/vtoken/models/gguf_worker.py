"""The process behind `gguf.write_checkpoint`: python -m vtoken.models.gguf_worker FILE FOLDER.

Ends with code 0, or with 1 and the reason as the last line on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vtoken.base.errors import CheckpointError
from vtoken.models.registry import supported_architectures
from vtoken.models.shards import SINGLE_NAME


def convert(path: Path, folder: Path) -> None:
    """Decode `path` with transformers and save it as a plain checkpoint."""
    reader = _read(path)
    _check_rope(reader)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    _check_config(AutoConfig.from_pretrained(**source))
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = model.config
    # A note on where the weights came from, which makes save_pretrained refuse; they are plain float32 by now.
    del config.quantization_config
    config.architectures = [type(model).__name__]
    if config.model_type == "phi3":  # which transformers forgets
        config.sliding_window = _number(reader, "phi3.attention.sliding_window") or None
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    weights = model.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / SINGLE_NAME, metadata={"format": "pt"})
    # safetensors makes its files private; who may read the folder may read the weights.
    (folder / SINGLE_NAME).chmod(folder.stat().st_mode & 0o666)


def _read(path: Path) -> GGUFReader:
    """Open a file: this walks over all of its header and checks that every tensor is there."""
    try:
        return GGUFReader(path)
    except Exception as error:  # numpy's and Python's own, at whatever the damage leads the reader to
        raise CheckpointError(
            f"the file is damaged or incomplete; get it again ({type(error).__name__}: {error})"
        ) from error


def _check_rope(reader: GGUFReader) -> None:
    """transformers leaves GGUF's rope scaling out without a word, and long answers go wrong: refuse it instead."""
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            raise CheckpointError(f"rope scaling {field.contents()!r} in GGUF files is not supported; use safetensors")
    for tensor in reader.tensors:
        if tensor.name.startswith(("rope_freqs.", "rope_factors_")):
            raise CheckpointError(
                "rope frequency factors (Llama 3.1, long Phi) in GGUF files are not supported; use safetensors"
            )
    turning = _number(reader, "phi3.rope.dimension_count")
    heads = _number(reader, "phi3.attention.head_count")
    if turning and heads and turning * heads != _number(reader, "phi3.embedding_length"):
        raise CheckpointError("rope of part of a head (Phi-4-mini) in GGUF files is not supported; use safetensors")


def _number(reader: GGUFReader, key: str) -> int:
    """0 where the file has no such key."""
    field = reader.fields.get(key)
    return 0 if field is None else int(field.contents())


def _check_config(config: PreTrainedConfig) -> None:
    """The architecture is one of ours, and the file says what transformers takes for granted."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    if architecture not in supported_architectures():
        raise CheckpointError(
            f"architecture {architecture} is not supported; supported are {', '.join(supported_architectures())}"
        )
    # 256 in all of Gemma 2 and 3 but the 27B models, whose files do not say so.
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar is not None and scalar != config.head_dim:
        raise CheckpointError(
            f"{architecture} with heads of {config.head_dim} in GGUF files does not say how attention is scaled; use "
            "safetensors"
        )


def main() -> int:
    path, folder = map(Path, sys.argv[1:])
    try:
        convert(path, folder)
    except Exception as error:  # whatever transformers and gguf raise on damaged files: the parent tells the user
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        reason = " ".join(str(error).split())
        print(f"{kind}{reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
