"""An answer as it comes, from asyncio; any number may run at once.

Run it with .venv/bin/python after `make demo`, which gets the model.
"""

from __future__ import annotations

import asyncio

from vtoken import AsyncLLM, SamplingParams


async def main() -> None:
    async with AsyncLLM("smollm2-135m", kv_memory="256MiB", max_model_len="auto") as llm:
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        params = SamplingParams(temperature=0.0, max_tokens=40)
        async for output in llm.chat(question, params, output_kind="delta"):
            print(output.outputs[0].text, end="", flush=True)
        print()


asyncio.run(main())
