"""`Entrance`: what may come in, and as what."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from vtoken.base.errors import ConfigError, RequestError
from vtoken.base.sampling_params import SamplingParams
from vtoken.policies.registry import resolve_policy
from vtoken.policies.statistics import FutureAttention, Statistic
from vtoken.schedule.beam_search import BeamSearch
from vtoken.schedule.capacity import Capacity
from vtoken.schedule.config import SchedulerConfig
from vtoken.schedule.logit_rules import ends_of, rules_of
from vtoken.schedule.retention import Retention, RetentionSettings
from vtoken.schedule.sequence import Request
from vtoken.schedule.text_rules import TextRules


class Entrance:
    """Makes a `Request` of what somebody asks for, or says why it could never run.

    Looks at settings and at the size of the pool, never at what the pool holds: so any thread may ask at any time.
    `statistics` are what policies can be told here. Raises ConfigError for settings with which nothing could run.
    """

    def __init__(
        self, config: SchedulerConfig, num_blocks: int, block_size: int, statistics: frozenset[type[Statistic]]
    ) -> None:
        self.capacity = Capacity(num_blocks, block_size, config.max_model_len, config.max_num_seqs, config.kv_mode)
        self._config = config
        self._block_size = block_size
        self._statistics = statistics
        try:
            lone = RetentionSettings().resolve(config.retention, block_size)
        except RequestError as error:
            raise ConfigError(str(error)) from None
        self.capacity.check_longest(lone)

    def make(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        seed: int,
        index: int,
        arrival_time: float,
        cache_salt: str | None,
        text_rules: TextRules,
    ) -> Request:
        """The request, its `max_tokens` clamped to the room there is. Raises RequestError if it could never run."""
        num_prompt_tokens, eos, lengths = len(prompt_token_ids), self._config.eos_token_ids, self._config.rope_lengths
        max_tokens, retention = self.check(num_prompt_tokens, params)
        request = Request(
            request_id,
            prompt_token_ids,
            params.replace(max_tokens=max_tokens),
            seed,
            index,
            arrival_time,
            self._block_size,
            cache_salt,
            retention,
            self.capacity.must_be_tight(num_prompt_tokens, max_tokens, params.num_choices, retention),
            rope_length=None if lengths is None else lengths.of(num_prompt_tokens + max_tokens),
        )
        request.rules = rules_of(request.params, prompt_token_ids, eos, text_rules)
        if params.use_beam_search:
            request.beam_search = BeamSearch(params, max_tokens, ends_of(params, eos))
        return request

    def check(self, num_prompt_tokens: int, params: SamplingParams) -> tuple[int, Retention | None]:
        """(new tokens that a choice may have, what the request keeps of its text)

        Raises RequestError for a request that could never run.
        """
        self.capacity.check_prompt(num_prompt_tokens)
        retention = self._retention(params, num_prompt_tokens)
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            message = f"min_tokens: {params.min_tokens} is more than max_tokens={params.max_tokens}"
            raise RequestError(message, "min_tokens")
        max_tokens = self.capacity.clamp(
            num_prompt_tokens, params.max_tokens, params.num_choices, retention, n_field=params.choices_field
        )
        return max_tokens, retention

    def _retention(self, params: SamplingParams, num_prompt_tokens: int) -> Retention | None:
        """What a request keeps of its text. Raises RequestError for settings that cannot work."""
        try:
            policy = None if params.kv_policy is None else resolve_policy(params.kv_policy)
        except ConfigError as error:
            raise RequestError(f"kv_policy: {error}", "kv_policy") from None
        own = RetentionSettings(
            policy,
            params.kv_budget,
            params.kv_trigger,
            params.kv_stride,
            params.kv_prefill_stride,
            params.kv_pin,
            params.kv_prompt_end,
        )
        retention = own.resolve(self._config.retention, self._block_size)
        if retention is None or self._config.kv_mode == "native":
            return None
        retention.check(num_prompt_tokens, self._block_size)
        needs, name = retention.policy.needs, retention.policy.name
        if params.use_beam_search and any(isinstance(need, FutureAttention) for need in needs):
            raise RequestError(
                f"use_beam_search: kv_policy={name!r} looks back on the queries of one sequence, and beams take over "
                "from each other; use another policy",
                "use_beam_search",
            )
        for statistic in needs:
            if type(statistic) not in self._statistics:
                known = ", ".join(sorted(each.__name__ for each in self._statistics)) or "none"
                raise RequestError(
                    f"kv_policy: {name} needs {type(statistic).__name__}, which this model and attention backend do "
                    f"not give (they give: {known})",
                    "kv_policy",
                )
        return retention
