"""A talk with a server, by OpenAI's client.

Run it with .venv/bin/python after `make demo`, while `vtoken serve smollm2-135m --max-model-len auto` runs;
$VTOKEN_URL says where, if that is not on this machine.
"""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("VTOKEN_URL", "http://127.0.0.1:8000/v1"), api_key="none")
answer = client.chat.completions.create(
    model="smollm2-135m",
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}],
    temperature=0,
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"kv_policy": "h2o", "kv_budget": 40, "kv_trigger": "always", "kv_pin": "system"},
)
for event in answer:
    for choice in event.choices:
        print(choice.delta.content, end="", flush=True)
    if event.usage is not None:
        print(f"\n{event.usage.kept_tokens} tokens kept, {event.usage.evicted_tokens} evicted")
