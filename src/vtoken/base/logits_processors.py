"""Functions that requests bring along to change their logits: how many arguments they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def takes_prompt(function: Callable[..., Any]) -> bool:
    """Whether it is a function of three arguments, the first of which is the prompt; as in vLLM the signature tells.

    Raises ValueError for one that takes neither two nor three.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return False
    num_places = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    takes_more = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if num_places not in (2, 3) and not (takes_more and num_places < 2):
        raise ValueError(f"expected a function of two or three arguments, got one of {num_places}")
    return num_places == 3
