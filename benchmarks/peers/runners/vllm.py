"""vLLM's CPU build through `LLM.generate`, and `LLMEngine.add_request` and `step` for arrivals.

The engine core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0, set in `engines.py`): on two cores that is
faster than a process of its own, and it makes the step loop the same as vtoken's.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence

from benchmarks.peers.runners.arrivals import Progress
from benchmarks.peers.runners.protocol import read_spec, run_arrivals, run_offline, write_result
from benchmarks.peers.workloads import Request


def main() -> None:
    spec = read_spec()
    settings = dict(spec.settings)
    if settings.pop("zentorch"):
        importlib.import_module("zentorch")  # vLLM goes on without it in silence, and would measure something else
    else:
        # vLLM takes AMD's kernels whenever it can import them; None makes the import fail, as if they were not there.
        sys.modules["zentorch"] = None  # type: ignore[assignment]
    started = time.perf_counter()
    import vllm  # type: ignore[import-not-found]
    from vllm import LLM, SamplingParams

    llm = LLM(
        spec.model,
        skip_tokenizer_init=True,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **settings,
    )
    startup_s = time.perf_counter() - started

    def greedy(output_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)

    def generate(prompts: Sequence[list[int]], output_tokens: int) -> list[list[int]]:
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(output_tokens), use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    class Stepping:
        """The engine, stepped in this thread."""

        def __init__(self) -> None:
            self._seen: dict[str, int] = {}

        def submit(self, index: int, request: Request) -> None:
            self._seen[str(index)] = 0
            prompt = {"prompt_token_ids": request.prompt}
            llm.llm_engine.add_request(str(index), prompt, greedy(request.output_tokens))

        def advance(self, max_wait: float | None) -> list[Progress]:
            outputs = llm.llm_engine.step()
            at = time.perf_counter()
            progress = []
            for output in outputs:
                total = len(output.outputs[0].token_ids)
                new = total - self._seen[output.request_id]
                progress.append(Progress(int(output.request_id), new, at, output.finished))
                self._seen[output.request_id] = total
            return progress

    result = run_arrivals(spec, Stepping()) if spec.kind == "arrivals" else run_offline(spec, generate)
    write_result(result | {"startup_s": startup_s, "version": vllm.__version__})


if __name__ == "__main__":
    main()
