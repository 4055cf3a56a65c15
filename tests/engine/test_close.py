"""What is closed is closed: its memory is gone, and using it says so."""

from __future__ import annotations

import pytest

from vtoken import LLM, EngineError, SamplingParams


def test_a_closed_llm_refuses_to_answer(folder):
    with LLM(str(folder), num_blocks=16, max_model_len="auto") as llm:
        llm.engine.add_request("left over", "x", SamplingParams(max_tokens=50))
        llm.engine.step()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", use_tqdm=False)
    with pytest.raises(EngineError, match="closed"):
        llm.engine.add_request("a", "x")
    assert llm.stats().usage.held_blocks == 0
    assert llm.engine.executor.store.nbytes == 0
