"""What engine settings and requests have in common to say about eviction: types and the words for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from vtoken.base.validation import shorten

KVTrigger = Literal["pressure", "always"]
KV_POLICY_EXPECTED = "the name of a policy that `vtoken policies` shows, 'name:parameter=value', or a Policy"
KV_BUDGET_EXPECTED = "a whole number of tokens from 1 up, or a share of the text above 0 and below 1, such as 0.5"
KV_STRIDE_EXPECTED = "a whole number of tokens from 1 up, or None (the policy's own)"
KV_PREFILL_STRIDE_EXPECTED = (
    "a whole number of tokens from 1 up, 0 (at the end of the prompt), or None (the policy's own)"
)
KV_PROMPT_END_EXPECTED = "a whole number of tokens from 1 up, or None (the whole prompt)"
KV_PIN_EXPECTED = "pairs (start, end) of positions in the prompt, end not included, such as [(0, 24)]"

_INT32_MAX = 2**31 - 1


def _check_policy(policy: Any) -> Any:
    # Policies are resolved further up, where they are known; here only what can be told without them.
    if isinstance(policy, str) and policy.strip():
        return policy
    if callable(getattr(policy, "score", None)) and not isinstance(policy, type):
        return policy
    raise ValueError(f"expected {KV_POLICY_EXPECTED}, got {shorten(policy)}")


def _check_budget(budget: Any) -> Any:
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if is_number and ((isinstance(budget, int) and 1 <= budget <= _INT32_MAX) or 0 < budget < 1):
        return budget
    raise ValueError(f"expected {KV_BUDGET_EXPECTED}, got {shorten(budget)}")


def _as_pins(pins: Any) -> Any:
    if pins is None:
        return ()
    try:
        pairs = tuple(tuple(pair) for pair in pins)
    except TypeError:
        pairs = ((),)
    for pair in pairs:
        is_pair = len(pair) == 2 and all(isinstance(each, int) and not isinstance(each, bool) for each in pair)
        if not is_pair or not 0 <= pair[0] < pair[1] <= _INT32_MAX:
            raise ValueError(f"expected {KV_PIN_EXPECTED}, got {shorten(pins)}")
    return pairs


KVPolicy = Annotated[Any, BeforeValidator(_check_policy)]
KVBudget = Annotated[Any, BeforeValidator(_check_budget)]
KVStride = Annotated[int, Field(ge=1, le=_INT32_MAX)]
KVPrefillStride = Annotated[int, Field(ge=0, le=_INT32_MAX)]
KVPromptEnd = Annotated[int, Field(ge=1, le=_INT32_MAX)]
KVPins = Annotated[tuple[tuple[int, int], ...], Strict(False), BeforeValidator(_as_pins)]
