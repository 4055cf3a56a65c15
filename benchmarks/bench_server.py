"""The server under load: throughput and waits by number of clients, and what it costs beside the engine alone.

Everything runs on one machine, so clients take from the cores that the server needs. They are a process of their own
that does next to nothing, and their CPU time is told. What the server itself costs is measured beside the engine
offline, in turns, in two ways: all on all cores, and with one core for the engine and another for the clients. CPU time
a token is the same comparison without the clients. "Watched" is the same server while somebody looks at its dashboard.

    PYTHONPATH=. python benchmarks/bench_server.py [--rounds 5] [--clients 1 8 32 128] [--smoke]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import served_arms
from benchmarks.peers.figures import Spread, percentile
from benchmarks.peers.prompts import PromptSource
from benchmarks.served_arms import MODEL, Arm

PROMPT_TOKENS = 32
SETTINGS = {"num_blocks": 2048, "max_num_seqs": 128, "max_model_len": 1024, "enable_prefix_caching": False, "seed": 0}
WATCHED = "server, watched"
AT_ONCE = 32  # requests of the comparison with the engine alone


class Prompts:
    """Random ids above the special tokens, no two beginnings alike: what they say does not matter to any figure."""

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        self._source = PromptSource([draw.randrange(256, 49000) for _ in range(400_000)], seed)

    def __call__(self, count: int) -> list[list[int]]:
        return self._source.batch([PROMPT_TOKENS] * count)


def params(output_tokens: int) -> dict[str, Any]:
    return {"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}


def bodies(prompts: list[list[int]], output_tokens: int) -> list[dict[str, Any]]:
    return [{"model": MODEL, "prompt": prompt, **params(output_tokens)} for prompt in prompts]


# --- by number of clients -------------------------------------------------------------------------------------------


def load(server: Arm, clients: Arm, prompts: Prompts, num_clients: int, num_requests: int, output_tokens: int) -> None:
    asked = bodies(prompts(num_requests), output_tokens)
    before = server.cpu_seconds, clients.cpu_seconds
    seconds, answers = clients.ask(server.hello, asked, num_clients)
    cpu = server.cpu_seconds - before[0], clients.cpu_seconds - before[1]
    num_tokens = sum(answer.num_tokens for answer in answers)
    assert num_tokens == num_requests * output_tokens
    firsts = [answer.token_times[0] - answer.sent for answer in answers]
    gaps = [b - a for answer in answers for a, b in itertools.pairwise(answer.token_times)]
    cells = [f"{num_clients}", f"{num_requests}", f"{num_tokens / seconds:.0f}"]
    for values in (firsts, gaps):
        cells += [f"{percentile(values, share) * 1e3:.0f}" for share in (0.5, 0.95)]
    cells += [f"{each / num_tokens * 1e3:.2f}" for each in cpu]
    cells += [f"{sum(len(answer.token_times) for answer in answers) / num_tokens:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


# --- beside the engine alone ----------------------------------------------------------------------------------------


@dataclass
class Side:
    """What one of those compared took, by round."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of its process, a token, in ms

    def overhead(self, other: Side, name: str) -> Spread:
        """Beside `other` in the same round, as a share."""
        pairs = zip(getattr(self, name), getattr(other, name), strict=True)
        return Spread.of([mine / theirs - 1 for mine, theirs in pairs])


def compare(
    arms: dict[str, Arm], clients: Arm, watcher: Arm, prompts: Prompts, rounds: int, output_tokens: int
) -> dict[str, Side]:
    """All answer the same prompts, in turns; whoever was first is last in the next round."""
    arms = {**arms, WATCHED: arms["server"]}
    sides = {name: Side() for name in arms}
    names = list(arms)
    for number in range(-1, rounds):  # one that does not count
        asked = prompts(AT_ONCE)
        texts: dict[str, list[str]] = {}
        for name in names:
            arm = arms[name]
            if name == WATCHED:
                watcher.ask(arm.hello)
            before = arm.cpu_seconds
            if name in ("server", WATCHED):
                seconds, answers = clients.ask(arm.hello, bodies(asked, output_tokens), AT_ONCE)
                texts[name], num_tokens = [each.text for each in answers], sum(each.num_tokens for each in answers)
            else:
                seconds, texts[name], num_tokens = arm.ask(asked, params(output_tokens))
            assert num_tokens == AT_ONCE * output_tokens
            if number >= 0:
                sides[name].seconds.append(seconds)
                sides[name].cpu.append((arm.cpu_seconds - before) / num_tokens * 1e3)
            if name == WATCHED:
                assert watcher.ask(None) > seconds, "less than a frame a second came"
        assert len({tuple(each) for each in texts.values()}) == 1, "they do not say the same"
        names.reverse()
    return sides


def show(title: str, sides: dict[str, Side], output_tokens: int) -> None:
    base = sides["LLM.generate"]
    for name, side in sides.items():
        num_tokens = AT_ONCE * output_tokens
        cells = [title, name, f"{num_tokens / statistics.median(side.seconds):.0f}"]
        cells += [f"{statistics.median(side.cpu):.3f}"]
        for what in ("seconds", "cpu"):
            found = side.overhead(base, what)
            is_base = side is base
            cells.append("" if is_base else f"{found.median:+.1%} ({found.low:+.1%} to {found.high:+.1%})")
        print(f"| {' | '.join(cells)} |", flush=True)


def begin(cores: list[int], client_cores: list[int]) -> tuple[dict[str, Arm], Arm, Arm]:
    arms = {
        "LLM.generate": Arm(served_arms.offline, cores, SETTINGS),
        "AsyncLLM": Arm(served_arms.online, cores, SETTINGS),
        "server": Arm(served_arms.server, cores, SETTINGS),
    }
    return arms, Arm(served_arms.clients, client_cores), Arm(served_arms.watcher, client_cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="where to write the rounds of the comparison")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, which only show that all works")
    args = parser.parse_args()
    tokens, rounds = (8, 1) if args.smoke else (args.output_tokens, args.rounds)
    cores = sorted(os.sched_getaffinity(0))
    prompts = Prompts()
    found: dict[str, dict[str, Side]] = {}

    arms, clients, watcher = begin(cores, cores)
    clients.ask(arms["server"].hello, bodies(prompts(2), 8), 2)  # compiles, measures, records what is replayed
    print("| clients | requests | tokens a second | first token ms p50 | p95 | between tokens ms p50 | p95 ", end="")
    print("| CPU ms a token: server | clients | events a token |\n|---|---|---|---|---|---|---|---|---|---|")
    for count in args.clients:
        load(arms["server"], clients, prompts, count, count if args.smoke else min(max(4, 2 * count), 128), tokens)

    print("\n| cores | | tokens a second | CPU ms a token | wall beside LLM.generate | CPU time beside it |")
    print("|---|---|---|---|---|---|")
    if rounds:
        found["shared"] = compare(arms, clients, watcher, prompts, rounds, tokens)
        _write(args.json, found)
        show(f"{len(cores)}, clients too", found["shared"], tokens)
    for arm in (*arms.values(), clients, watcher):
        arm.end()
    if rounds and len(cores) > 1:
        arms, clients, watcher = begin(cores[:1], cores[1:2])
        found["apart"] = compare(arms, clients, watcher, prompts, rounds, tokens)
        show("1, clients elsewhere", found["apart"], tokens)
        _write(args.json, found)
        for arm in (*arms.values(), clients, watcher):
            arm.end()


def _write(path: Path | None, found: dict[str, dict[str, Side]]) -> None:
    if path is not None:
        path.write_text(json.dumps({how: {n: vars(s) for n, s in sides.items()} for how, sides in found.items()}))


if __name__ == "__main__":
    main()
