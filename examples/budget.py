"""A long answer in a small pool: old tokens die by policy when blocks run short, and their blocks are used again.

Run it with .venv/bin/python after `make demo`, which gets the model.
"""

from __future__ import annotations

from vtoken import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=160)

with LLM("smollm2-135m", num_blocks=8, max_model_len="auto", kv_policy="h2o", kv_budget=64) as llm:
    answer = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], params)[0].outputs[0]
    print(f"{answer.num_evicted} tokens were evicted, {answer.num_kept} kept, in a pool of 8 blocks of 16")
