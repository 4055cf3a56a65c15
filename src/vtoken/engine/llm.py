"""`LLM`: a model, ready to answer lists of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Self

from tqdm import tqdm

from vtoken.base.clock import MonotonicClock
from vtoken.base.config import EngineConfig
from vtoken.base.errors import EngineError, RequestError
from vtoken.base.sampling_params import SamplingParams
from vtoken.base.validation import shorten
from vtoken.engine.build import build_engine
from vtoken.engine.chat import Message, list_conversations
from vtoken.engine.engine import Engine
from vtoken.engine.outputs import RequestOutput
from vtoken.engine.prompts import Prompts, list_prompts, parse_prompt
from vtoken.engine.stats import EngineStats
from vtoken.engine.text import Tokenizer


class LLM:
    """Loads a model and answers prompts, many at once.

    >>> llm = LLM("smollm2-135m", num_blocks=256, max_model_len="auto")
    >>> [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0.0))

    Args:
        model: a checkpoint folder, a .gguf file, or a name that `vtoken models list` shows.
        settings: fields of `EngineConfig`, named as in vLLM: dtype, block_size, num_blocks or kv_memory,
            max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching, preemption, swap_space,
            kv_cache_dtype, quantization, attention_backend, linear_backend, seed, tokenizer, skip_tokenizer_init, ...

    Raises ConfigError or CheckpointError, in one line, for what cannot work.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings)
        self.engine: Engine = build_engine(self.config, MonotonicClock())
        self._num_calls = 0

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts; outputs come in the order of the prompts.

        Args:
            prompts: one prompt or a list. A prompt is text, token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`; a mapping may add a `"cache_salt"`. An empty one is the model's BOS token.
                Text is taken as it is; `chat` asks in the model's chat format.
            sampling_params: for all prompts, or a list with one for each.
            use_tqdm: show a progress bar.

        Raises RequestError, before anything runs, if one of the prompts or parameters is wrong. A request that fails
        later ends with finish_reason "error"; the others are not touched.
        """
        if self.engine.is_closed:
            raise EngineError("this LLM is closed; make a new one")
        if self.engine.has_unfinished_requests():
            raise EngineError("generate() was called while the engine has requests of its own; let them finish first")
        parsed = [parse_prompt(prompt) for prompt in list_prompts(prompts)]
        params = _params_for(len(parsed), sampling_params)
        self._num_calls += 1
        ids = [f"{self._num_calls}-{i}" for i in range(len(parsed))]
        try:
            for i, ((prompt, salt), each) in enumerate(zip(parsed, params, strict=True)):
                try:
                    self.engine.add_request(ids[i], prompt, each, output_kind="final", cache_salt=salt)
                except RequestError as error:
                    if len(parsed) == 1:
                        raise
                    raise type(error)(f"prompt {i} of {len(parsed)}: {error}", error.field) from None
            return self._run(ids, use_tqdm)
        except BaseException:  # Ctrl-C too: nothing of this call is left behind
            self.engine.abort_request(ids)
            while self.engine.has_unfinished_requests():
                self.engine.step()
            raise

    def beam_search(
        self,
        prompts: Prompts,
        beam_width: int,
        *,
        n: int | None = None,
        use_tqdm: bool = True,
        **params: Any,
    ) -> list[RequestOutput]:
        """Search for the likeliest answers to each prompt, with as many beams as `beam_width` says.

        Returns the `n` best (None: all), best first, with their `cumulative_logprob`. `params` are fields of
        `SamplingParams`: max_tokens, length_penalty, early_stopping, ignore_eos, stop_token_ids, min_tokens, kv_policy,
        ... Texts and scores are those of `transformers` with `num_beams=beam_width`. See `generate` for the rest.
        """
        if isinstance(beam_width, bool) or not isinstance(beam_width, int):
            message = f"beam_width: expected a whole number from 2 up, got {shorten(beam_width)}"
            raise RequestError(message, "beam_width")
        most = beam_width if n is None else n
        return self.generate(
            prompts, SamplingParams(use_beam_search=True, best_of=beam_width, n=most, **params), use_tqdm=use_tqdm
        )

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them, in the model's chat format.

        >>> llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(max_tokens=200))

        `messages`, `tools` and what follows are those of `Tokenizer.encode_chat`; the rest is as for `generate`. An
        answer has at most 16 tokens unless `sampling_params` says otherwise: `max_tokens=None` is all the room left.

        Raises RequestError, before anything runs, if a message or a parameter is wrong, or there is no chat template.
        """
        tokenizer, conversations = self.get_tokenizer(), list_conversations(messages)
        prompts = []
        for i, conversation in enumerate(conversations):
            try:
                token_ids = tokenizer.encode_chat(
                    conversation,
                    tools=tools,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                )
            except RequestError as error:
                if len(conversations) == 1:
                    raise
                raise RequestError(f"conversation {i} of {len(conversations)}: {error}", error.field) from None
            prompts.append({"prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        counters = self.engine.scheduler.counters
        num_before = counters.tokens_generated
        with tqdm(total=len(ids), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    outputs[output.request_id] = output
                    bar.update()
                bar.set_postfix_str(f"{counters.tokens_generated - num_before} tokens", refresh=False)
        return [outputs[request_id] for request_id in ids]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineError with skip_tokenizer_init=True."""
        if self.engine.tokenizer is None:
            raise EngineError("this engine has no tokenizer (skip_tokenizer_init=True)")
        return self.engine.tokenizer

    def stats(self) -> EngineStats:
        """What the memory holds now, and what happened so far."""
        return self.engine.stats()

    def close(self) -> None:
        """Give memory and threads back. May be called twice."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _params_for(
    num_prompts: int, params: SamplingParams | SequenceOf[SamplingParams] | None
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, SequenceOf) or not all(isinstance(each, SamplingParams) for each in params):
        raise RequestError(
            f"sampling_params: expected SamplingParams or a list of them, got {type(params).__name__}",
            "sampling_params",
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params: {len(params)} for {num_prompts} prompts; give one for all, or one for each",
            "sampling_params",
        )
    return list(params)
