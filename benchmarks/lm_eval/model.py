"""`vtoken` as a model of lm-eval. Needs lm-eval, so it is imported by the interpreter that has it only.

    python -m benchmarks.lm_eval.model run --model vtoken --model_args pretrained=smollm2-135m --tasks ...

is lm-eval's own command line with this model known to it.
"""

from __future__ import annotations

from typing import Any

from benchmarks.lm_eval.scoring import Pair, generate, score
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from vtoken.engine.llm import LLM


@register_model("vtoken")
class VtokenLM(TemplateLM):
    """A model that vtoken runs.

    Args:
        pretrained: as `LLM` takes it: a folder, a .gguf file or a known name.
        settings: fields of `EngineConfig`, for instance `kv_policy="h2o", kv_budget=128, kv_trigger="always"`. The
            engine batches by itself and runs where it was built for, so lm-eval's own `batch_size`, `max_batch_size`
            and `device` change nothing.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.max_gen_toks = max_gen_toks
        self.llm = LLM(pretrained, **{"max_model_len": "auto", **settings})
        self.tokenizer = self.llm.get_tokenizer().backend
        self._max_model_len = self.llm.stats().max_model_len

    @property
    def max_length(self) -> int:
        """Tokens that a scored text may read: one more is predicted, and a request asks for a token behind that."""
        return self._max_model_len - 2

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.pretrained.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            # Not twice: chat templates write the BOS token themselves.
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        token_ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return token_ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        found = score(self.llm, [(context, scored) for _, context, scored in requests], self.max_length)
        for (texts, _, _), each in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, each)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[list[Pair]] = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows.append([make_disjoint_window(pair) for pair in pairs])
        scores = iter(score(self.llm, [pair for pairs in windows for pair in pairs], self.max_length))
        totals = [sum(next(scores)[0] for _ in pairs) for pairs in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        contexts = [self.tok_encode(request.args[0]) for request in requests]
        settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        texts = generate(self.llm, contexts, settings, self._max_model_len)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
