"""The smallest use: three prompts at once. Get the model first: vtoken models get smollm2-135m"""

from __future__ import annotations

from vtoken import LLM, SamplingParams

prompts = ["The capital of France is", "The chemical symbol of gold is", "The opposite of hot is"]
params = SamplingParams(temperature=0.0, max_tokens=2)

with LLM("smollm2-135m", kv_memory="256MiB", max_model_len="auto") as llm:
    for answer in llm.generate(prompts, params):
        print(answer.prompt + answer.outputs[0].text)
