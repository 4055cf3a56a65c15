"""The engine below `LLM`, step by step, with a chat prompt. Get the model first: vtoken models get smollm2-135m"""

from __future__ import annotations

from vtoken import LLM, SamplingParams

with LLM("smollm2-135m", kv_memory="256MiB", max_model_len="auto") as llm:
    engine = llm.engine
    chat = llm.get_tokenizer().encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    engine.add_request("a", chat, SamplingParams(temperature=0.0, max_tokens=40))
    engine.add_request(
        "b", "The capital of France is", SamplingParams(temperature=0.0, max_tokens=8), output_kind="final"
    )
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = output.outputs[0]
            if output.request_id == "a" and len(answer.token_ids) == 20:
                engine.abort_request("a")  # its last output comes from the next step
            if output.finished:
                print(f"{output.request_id} ended by {answer.finish_reason}: {answer.text!r}")
