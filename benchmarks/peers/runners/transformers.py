"""transformers: `generate` for batches, the continuous batching that `generate_batch` runs on for arrivals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.runners.arrivals import Progress
from benchmarks.peers.runners.protocol import read_spec, run_arrivals, run_offline, write_result
from benchmarks.peers.workloads import Request


def greedy(output_tokens: int) -> GenerationConfig:
    """Exactly so many tokens: with no end-of-sequence id nothing ends early."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=output_tokens, eos_token_id=None, pad_token_id=0
    )


class Continuous:
    """The continuous batching manager, which steps in a thread of its own and puts each new token into a queue."""

    def __init__(self, model: Any, max_num_seqs: int) -> None:
        config = ContinuousBatchingConfig(max_requests_per_batch=max_num_seqs, allow_block_sharing=False)
        self._manager = model.init_continuous_batching(greedy(1), continuous_batching_config=config)
        self._manager.start()
        self._index: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def submit(self, index: int, request: Request) -> None:
        name = self._manager.add_request(
            request.prompt, max_new_tokens=request.output_tokens, streaming=True, eos_token_id=-1
        )
        self._index[name], self._seen[name] = index, 0

    def advance(self, max_wait: float | None) -> list[Progress]:
        output = self._manager.get_result(timeout=max_wait)
        at = time.perf_counter()
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("the continuous batching thread ended")
            return []
        if output.error:
            raise RuntimeError(output.error)
        name, total = output.request_id, len(output.generated_tokens)
        new, self._seen[name] = total - self._seen[name], total
        return [Progress(self._index[name], new, at, output.is_finished())]

    def stop(self) -> None:
        self._manager.stop(block=True)


def main() -> None:
    spec = read_spec()
    torch.set_num_threads(spec.threads)
    started = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(spec.model, local_files_only=True, **spec.settings)
    model.eval()
    model.generation_config = greedy(1)  # the checkpoint's own would fill in its end-of-sequence id
    startup_s = time.perf_counter() - started

    @torch.inference_mode()
    def generate(prompts: Sequence[list[int]], output_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)  # [batch, prompt_tokens]: all of one length, so there is no padding
        answers = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy(output_tokens))
        return [answer[ids.shape[1] :].tolist() for answer in answers]

    if spec.kind == "arrivals":
        engine = Continuous(model, spec.max_num_seqs)
        result = run_arrivals(spec, engine)
        engine.stop()
    else:
        result = run_offline(spec, generate)
    write_result(result | {"startup_s": startup_s, "version": transformers.__version__})


if __name__ == "__main__":
    main()
