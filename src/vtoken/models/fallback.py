"""Any other decoder of `transformers`, by its own code: slower than a family of ours, and just as paged.

Its layers attend by way of transformers' attention interface, so attention is ours, and so is all that comes of it:
the cache, eviction, KV formats. Its matrices are ours too. What lies between is run as it is.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as their_logging

from vtoken.base.errors import CheckpointError, describe
from vtoken.models import attention_interface
from vtoken.models.attention_interface import AttentionCall, served_by
from vtoken.models.base import Attend, CausalLM, WeightTarget
from vtoken.models.config import CheckpointConfig, generation_eos_token_ids
from vtoken.models.kernels import BATCH_INVARIANT, Kernels
from vtoken.models.layers import Linear
from vtoken.models.probe import NOT_BY_INTERFACE, AttentionShape, Unsuited, check_logits, dense_attend, read_attention
from vtoken.models.registry import supported_architectures
from vtoken.models.shards import FLOATS, find_shards, not_a_float
from vtoken.models.spec import ModelSpec
from vtoken.policies.statistics import FutureAttention, Statistic

logger = logging.getLogger("vtoken")

_PLAIN_LAYERS: Final = {"full_attention", "sliding_attention"}  # of a config's `layer_types`
_MASKS: Final = re.compile(r"\.(attn|attention|self_attn)\.(masked_)?bias$|\.position_ids$")
_CHECKED_LENGTHS: Final = (6, 7)  # tokens of the texts that a model is tried with


class Fallback(CausalLM):
    """A model of transformers behind our face. `load_fallback` makes it."""

    is_replayable = False
    # Queries arrive already turned to their positions.
    missing_statistics: ClassVar[frozenset[type[Statistic]]] = frozenset({FutureAttention})

    def __init__(self, theirs: PreTrainedModel, dtype: torch.dtype, kernels: Kernels) -> None:
        """Take over a loaded model that attends by `attention_interface.NAME`. Its `spec` is still to be set."""
        super().__init__()
        _exchange_linears(theirs, kernels)
        theirs.requires_grad_(False)
        self._decoder = theirs.base_model
        # What is left is the head, with all that it does to logits.
        setattr(theirs, theirs.base_model_prefix, _Handed())
        self._head = theirs
        self._dtype = dtype

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The two side by side, [T, 2]: transformers embeds them itself, at the beginning of `decode`."""
        return torch.stack((token_ids, positions), dim=1)

    def decode(self, x: Tensor, attend: Attend) -> Tensor:
        calls = iter(range(self.spec.num_layers))

        def serve(call: AttentionCall) -> Tensor:
            return attend(next(calls), call.qkv)

        with served_by(serve):
            hidden = self.run(x[:, 0], x[:, 1])
        assert next(calls, None) is None, "a layer did not attend"
        return hidden

    def run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Their decoder, as whoever calls serves it: [T], [T] -> [T, hidden_size]."""
        output = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def weight_map(self) -> dict[str, WeightTarget]:
        """Nothing for the loader to fill: transformers has done it."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def flops_per_token(self) -> int:
        """As if all weights but the embeddings took part; in a mixture of experts fewer do."""
        return 2 * sum(_num_weights(module) for module in self._decoder.modules())


class _Handed(nn.Module):
    """In the decoder's place below the head: returns the hidden states that the head's model was given."""

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class _Output(MoeModelOutputWithPast):
    """Whatever else a head may look for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _FlatLinear(nn.Module):
    """Our `Linear` where theirs was: any leading dimensions, flattened to rows."""

    def __init__(self, theirs: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        sizes = theirs.in_features, theirs.out_features
        with torch.device("meta"):
            self.linear = Linear(*sizes, bias=theirs.bias is not None, dtype=theirs.weight.dtype, kernels=kernels)
        self.linear.weight, self.linear.bias = (cast(nn.Parameter | None, p) for p in (theirs.weight, theirs.bias))
        self.in_features, self.out_features = sizes

    def forward(self, x: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        out: Tensor = self.linear(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)


def _exchange_linears(model: nn.Module, kernels: Kernels) -> None:
    """Put ours in the place of every plain `nn.Linear`; subclasses may compute something else and stay."""
    ours: dict[nn.Module, _FlatLinear] = {}  # a layer may stand in two places
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, ours.setdefault(child, _FlatLinear(child, kernels)))


def _num_weights(module: nn.Module) -> int:
    """Of the matrices that the module itself holds, and that tokens are multiplied by."""
    if isinstance(module, Linear):
        return module.in_features * module.out_features
    if isinstance(module, nn.Embedding):
        return 0
    return sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter.ndim > 1)


def load_fallback(config: CheckpointConfig, dtype: torch.dtype, kernels: Kernels = BATCH_INVARIANT) -> CausalLM:
    """Load a checkpoint of an architecture that we have no family for.

    Raises CheckpointError where transformers does not know it either, for files that do not fill it, and for a model
    that attends otherwise than through the interface, or in ways that ours does not have.
    """
    theirs_config = _read_their_config(config)
    try:
        _check_config(config, theirs_config)
        _check_weights(config.folder)
        with _quiet():
            theirs = _load(config.folder, theirs_config, dtype)
            model = _take_over(theirs, config, dtype, kernels)
    except Unsuited as error:
        raise CheckpointError(
            f"{config.path}: {config.architecture} cannot be served by transformers' own code: {error}; "
            f"{_own_families()}"
        ) from error
    logger.warning(
        "%s is served by transformers' own code, with vtoken's attention and matrices: slower than a family of its own",
        config.architecture,
    )
    return model


def _read_their_config(config: CheckpointConfig) -> PreTrainedConfig:
    """The checkpoint's config as transformers reads it. Raises CheckpointError for an architecture it does not have."""
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            config.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever its config classes raise on bad values
        raise _unknown(config, f": {describe(error)}") from error
    if config.architecture != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(found.model_type):
        raise _unknown(config, " as a decoder that continues text")
    return found


def read_their_limits(config: CheckpointConfig) -> tuple[int, int]:
    """Size of the vocabulary and number of positions, without the weights. Raises CheckpointError."""
    theirs = _read_their_config(config)
    return theirs.get_text_config().vocab_size, _max_positions(config, theirs)


def _max_positions(config: CheckpointConfig, theirs: PreTrainedConfig) -> int:
    found = getattr(theirs.get_text_config(), "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        raise CheckpointError(f"{config.path}: max_position_embeddings must be an integer from 1, found {found!r}")
    return found


def _unknown(config: CheckpointConfig, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{config.path}: architecture {config.architecture} is not supported; {_own_families()}, and what "
        f"transformers has runs by its code, but transformers {transformers.__version__} does not have it{reason}"
    )


def _own_families() -> str:
    return f"vtoken's own are {', '.join(supported_architectures())}"


def _check_config(config: CheckpointConfig, theirs: PreTrainedConfig) -> None:
    """Refuse what the config alone tells, before the weights are read."""
    text = theirs.get_text_config()
    if theirs.is_encoder_decoder:
        raise Unsuited("it has an encoder")
    others = set(getattr(text, "layer_types", None) or ()) - _PLAIN_LAYERS
    if others:
        raise Unsuited(f"it has layers of the kind {', '.join(sorted(others))}")
    for rope in _rope_types(getattr(text, "rope_parameters", None)):
        if "dynamic" in rope or rope == "longrope":
            raise Unsuited(f"its rope ({rope}) depends on the longest text of a batch")
    if getattr(text, "max_position_embeddings", None) is None:
        raise Unsuited("it has no number of positions (max_position_embeddings), as with ALiBi or without positions")
    _max_positions(config, theirs)


def _rope_types(parameters: Any) -> Iterator[str]:
    """Of one set of parameters, or of one for each kind of layer."""
    if isinstance(parameters, dict):
        yield str(parameters.get("rope_type", "default"))
        for value in parameters.values():
            yield from _rope_types(value)


def _check_weights(folder: Path) -> None:
    """Refuse files that are damaged or hold weights as integers; old ones hold masks so."""
    for shard in find_shards(folder):
        for name, dtype in shard.dtypes.items():
            if dtype not in FLOATS and not _MASKS.search(name):
                raise not_a_float(shard.path, name, dtype)


def _load(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Weights and all. Raises CheckpointError where the files and the config do not go together."""
    load: Any = AutoModelForCausalLM.from_pretrained  # whose types know nothing of the report
    model: PreTrainedModel
    try:
        model, report = load(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention_interface.NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they come with the report
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers raises on damaged files and odd sizes
        if isinstance(error, KeyError) and error.args == (attention_interface.NAME,):
            # It looks for a class of that name: code from before the interface.
            raise Unsuited(NOT_BY_INTERFACE) from error
        raise CheckpointError(f"{folder}: transformers cannot load it: {describe(error)}") from error
    for kind, what in (
        ("missing_keys", "missing from the weights"),
        ("mismatched_keys", "of another shape than config.json makes them"),
        ("unexpected_keys", "in the weights, but not in the model that config.json describes"),
    ):
        names = sorted(name if isinstance(name, str) else name[0] for name in report[kind])
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise CheckpointError(f"{folder}: tensors {what}: {shown}")
    model.train(mode=False)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no table of what was loaded: errors say what is wrong with it."""
    log: Any = their_logging  # it has no types
    had_bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()


@torch.inference_mode()
def _take_over(theirs: PreTrainedModel, config: CheckpointConfig, dtype: torch.dtype, kernels: Kernels) -> Fallback:
    """The served model, tried. Raises Unsuited."""
    if theirs.base_model is theirs:
        raise Unsuited("decoder and head are not apart")
    if "position_ids" not in inspect.signature(theirs.base_model.forward).parameters:
        raise Unsuited("it takes no positions")
    limit = _max_positions(config, theirs.config)
    token_ids = _some_tokens(theirs, sum(_CHECKED_LENGTHS))
    try:
        expected = torch.cat([_their_logits(theirs, part) for part in torch.split(token_ids, list(_CHECKED_LENGTHS))])
        model = Fallback(theirs, dtype, kernels)
        shape = read_attention(model.run, min(len(token_ids), limit), limit)
        model.spec = _spec(config, theirs.config, shape, vocab_size=expected.shape[1], max_positions=limit)
        # Shuffled, so that places in the batch say nothing about positions.
        order = (5 * torch.arange(len(token_ids))) % len(token_ids)
        owners = torch.arange(len(_CHECKED_LENGTHS)).repeat_interleave(torch.tensor(_CHECKED_LENGTHS))[order]
        positions = torch.cat([torch.arange(length) for length in _CHECKED_LENGTHS])[order]
        attend = dense_attend(shape, owners, positions)
        found = model.logits(model.decode(model.embed(token_ids[order], positions), attend))
    except (Unsuited, MemoryError):
        raise
    except Exception as error:  # it is anybody's code
        raise Unsuited(f"it cannot be run as vtoken runs it ({describe(error)})") from error
    check_logits(found, expected[order], dtype)
    return model


def _some_tokens(theirs: PreTrainedModel, num_tokens: int) -> Tensor:
    """All over the vocabulary, without the ids at its ends, which tend to be special."""
    vocab_size: int = theirs.config.get_text_config().vocab_size
    return (torch.arange(1, num_tokens + 1) * 7919) % max(1, vocab_size - 2) + 1


def _their_logits(theirs: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Of a whole text by transformers alone: [T] -> float32 [T, vocab_size]."""
    theirs.set_attn_implementation("eager")
    try:
        logits: Tensor = theirs(input_ids=token_ids[None], use_cache=False).logits[0]
    finally:
        theirs.set_attn_implementation(attention_interface.NAME)
    return logits.float()


def _spec(
    config: CheckpointConfig, theirs: PreTrainedConfig, shape: AttentionShape, *, vocab_size: int, max_positions: int
) -> ModelSpec:
    text = theirs.get_text_config()
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=vocab_size,
        hidden_size=text.hidden_size,
        num_layers=len(shape.layers),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        layers=shape.layers,
        eos_token_ids=_token_ids(text.eos_token_id, vocab_size) | generation_eos_token_ids(config.folder, vocab_size),
        bos_token_id=min(_token_ids(text.bos_token_id, vocab_size), default=None),
    )


def _token_ids(value: Any, vocab_size: int) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
