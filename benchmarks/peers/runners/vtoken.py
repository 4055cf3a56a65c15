"""vtoken, through its public face: `LLM.generate`, and `Engine.add_request` and `step` for arrivals."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.peers.runners.arrivals import Progress
from benchmarks.peers.runners.protocol import read_spec, run_arrivals, run_offline, write_result
from benchmarks.peers.workloads import KV_GIB, Request
from vtoken import LLM, SamplingParams, __version__


def greedy(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)


class Stepping:
    """The engine, stepped in this thread."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._seen: dict[str, int] = {}

    def submit(self, index: int, request: Request) -> None:
        self._seen[str(index)] = 0
        self._engine.add_request(str(index), request.prompt, greedy(request.output_tokens))

    def advance(self, max_wait: float | None) -> list[Progress]:
        outputs = self._engine.step()
        at = time.perf_counter()
        progress = []
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            total = len(output.outputs[0].token_ids)
            progress.append(
                Progress(int(output.request_id), total - self._seen[output.request_id], at, output.finished)
            )
            self._seen[output.request_id] = total
        return progress


def main() -> None:
    spec = read_spec()
    started = time.perf_counter()
    llm = LLM(
        spec.model,
        skip_tokenizer_init=True,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        kv_memory=f"{KV_GIB}GiB",
        prefault_kv=True,  # the peers' pools are written at start too
        enable_prefix_caching=False,
        **spec.settings,
    )
    startup_s = time.perf_counter() - started

    def generate(prompts: Sequence[list[int]], output_tokens: int) -> list[list[int]]:
        answers = llm.generate(prompts, greedy(output_tokens), use_tqdm=False)
        return [answer.outputs[0].token_ids for answer in answers]

    with llm:
        result = run_arrivals(spec, Stepping(llm)) if spec.kind == "arrivals" else run_offline(spec, generate)
    write_result(result | {"startup_s": startup_s, "version": __version__})


if __name__ == "__main__":
    main()
