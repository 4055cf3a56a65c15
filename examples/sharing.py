"""A real model answers several prompts at once in a small paged memory, and shows what the memory did.

    python examples/sharing.py

The first run downloads the model (about 100 MB) and converts it; later runs start at once.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vtoken import LLM, SamplingParams
from vtoken.cli.report import memory_table
from vtoken.engine.outputs import RequestOutput
from vtoken.models.catalog import get_model

# Small on purpose: the answers below do not all fit at once, so blocks must be shared, forgotten and taken away.
NUM_BLOCKS = 24

SYSTEM = (
    "You are a friendly teacher who answers the questions of children. Use simple words, be exact, stay on the "
    "question, and answer in one or two short sentences. If you do not know an answer, say so and do not guess."
)
QUESTIONS = [
    "Why is the sky blue?",
    "What is the capital of France?",
    "How do birds fly?",
    "Why does ice float on water?",
    "What is a computer?",
]
SAMPLED = "Give my cat a name, and say why it fits."
FOLLOW_UPS = ["Then why is a sunset red?", "And what is the capital of Italy?"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
FOUR_SAMPLES = SamplingParams(n=4, temperature=0.8, seed=7, max_tokens=24)

Message = dict[str, str]


def main() -> None:
    console = Console(highlight=False)
    folder = get_model("smollm2-135m", progress=console.print)
    with console.status("loading the model"):
        llm = LLM(str(folder), num_blocks=NUM_BLOCKS, max_model_len="auto")
    with llm:
        console.rule("Round 1: six prompts behind one system prompt")
        talks = [[_says("system", SYSTEM), _says("user", question)] for question in [*QUESTIONS, SAMPLED]]
        answers = run(llm, console, talks, [GREEDY] * len(QUESTIONS) + [FOUR_SAMPLES])
        show(console, talks, answers)

        console.rule("Round 2: two of the talks go on")
        talks = [
            [*talk, _says("assistant", answer.outputs[0].text), _says("user", follow_up)]
            for talk, answer, follow_up in zip(talks, answers, FOLLOW_UPS, strict=False)
        ]
        answers = run(llm, console, talks, [GREEDY] * len(talks))
        show(console, talks, answers)
        console.print(memory_table(llm.stats()))


def run(llm: LLM, console: Console, talks: list[list[Message]], params: list[SamplingParams]) -> list[RequestOutput]:
    """`llm.generate(...)` written out with the engine below it, to look at the memory after every step."""
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    for i, (talk, each) in enumerate(zip(talks, params, strict=True)):
        engine.add_request(str(i), tokenizer.encode_chat(talk), each, output_kind="final")
    finished: dict[str, RequestOutput] = {}
    most_shared, start = 0, time.perf_counter()
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step()}
            most_shared = max(most_shared, engine.stats().usage.shared_blocks)
            live.update(picture(llm))
    outputs = [finished[str(i)] for i in range(len(talks))]
    seconds = time.perf_counter() - start
    num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached_tokens = sum(output.num_cached_tokens for output in outputs)
    console.print(
        f"{num_tokens} tokens in {seconds:.1f} s ({num_tokens / seconds:.1f} a second); {cached_tokens} of "
        f"{prompt_tokens} prompt tokens were in memory already; up to {most_shared} blocks were shared\n",
        style="dim",
    )
    return outputs


def picture(llm: LLM) -> Text:
    """The pool, a sign for each block, and who is in it."""
    stats = llm.stats()
    usage = stats.usage
    private = usage.held_blocks - usage.shared_blocks
    return Text.assemble(
        ("█" * usage.shared_blocks, "magenta"),
        ("█" * private, "cyan"),
        ("▒" * usage.cached_blocks, "yellow"),
        ("·" * usage.free_blocks, "dim"),
        f"  shared {usage.shared_blocks}, own {private}, cached {usage.cached_blocks}, free {usage.free_blocks}; "
        f"{stats.num_running} running, {stats.num_waiting + stats.num_preempted} waiting",
    )


def show(console: Console, talks: list[list[Message]], outputs: list[RequestOutput]) -> None:
    for talk, output in zip(talks, outputs, strict=True):
        console.print(talk[-1]["content"], style="bold")
        for choice in output.outputs:
            cut = " …" if choice.finish_reason == "length" else ""
            console.print(f"  {choice.text.strip()}{cut}", markup=False)
        console.print()


def _says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


if __name__ == "__main__":
    main()
