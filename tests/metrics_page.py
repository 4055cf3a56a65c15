"""`docs/metrics.md`, made from the list of metrics: python -m tests.metrics_page writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vtoken.engine.advice import ENOUGH_REQUESTS, LOW_USE, MANY_PREEMPTIONS
from vtoken.server.metric_list import DISTRIBUTIONS, INFO_LABELS, INFO_MEANING, INFO_NAME, METRICS, Distribution, Metric
from vtoken.server.metrics import WAIT_SECONDS
from vtoken.server.settings import METRICS_PREFIX
from vtoken.server.step_recorder import REFRESH_SECONDS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

_HEAD = f"""# Metrics

Made from `src/vtoken/server/metric_list.py` by `python -m tests.metrics_page`; a test holds this page, the exported
names and the dashboard against each other. These names are stable: one that changes is in the changelog.

`GET /metrics` shows them in Prometheus' text form, or in OpenMetrics where the reader asks for it. Every name begins
with a prefix, `{METRICS_PREFIX}` unless `--metrics-prefix` says otherwise, and every sample has the labels `model_name`
and `engine` (always "0").

- **With the prefix `vllm:`** the names marked in the last column are those of vLLM's V1 engine, with its meaning,
  labels and bucket bounds, so dashboards and alerts made for vLLM work as they are. (Two are told more exactly: a
  chunk of a prompt is in `iteration_tokens_total` in the step that computes it, and `cache_config_info` has only the
  labels that say something here.) The other names have no counterpart there.
- **One page is one moment** between two steps. Counters and gauges are the engine's own, read when the page is asked
  for, so nothing is counted twice. A page waits at most {WAIT_SECONDS} s for a step to end; then it tells what was seen
  last, which is at most {REFRESH_SECONDS:g} s older than the last step that ended, and `snapshot_age_seconds` says how
  old that is. So `/metrics` answers while a step hangs, and after the engine has died.
- **Counters only grow** while the process lives. Requests that were aborted or failed are in `request_success_total`
  under their `finished_reason` (the name is vLLM's), and not in the histograms of those that "ended by themselves".
- **Live, dead, cached and free memory are told apart**: the states of `kv_blocks` add up to the pool, and so do those
  of `kv_cells`.
- Times are measured in the engine: what the network and a slow reader add is not in them.

A dashboard for Grafana: [grafana/vtoken.json](grafana/vtoken.json) (Dashboards, New, Import). With another prefix,
change it there first: `sed -i 's/vtoken:/vllm:/g' vtoken.json`.

```yaml
# prometheus.yml
scrape_configs:
  - job_name: vtoken
    static_configs:
      - targets: ["localhost:8000"]
```

Around an `AsyncLLM` of your own:

```python
from prometheus_client import start_http_server

from vtoken import AsyncLLM
from vtoken.server.metrics import Metrics

llm = AsyncLLM("smollm2-135m", kv_memory="256MiB", max_model_len="auto")
metrics = Metrics(llm, model_name="smollm2-135m")
start_http_server(9000, registry=metrics.registry)
```

{{cost}}

## Traces

`vtoken serve --otlp-traces-endpoint http://localhost:4318/v1/traces` sends each request, when it has ended, as an
OpenTelemetry span with one inside for its time in the queue, on the prompt and on the answer. It needs
`pip install 'vtoken[otel]'`. Attributes are those of the conventions for generative AI (`gen_ai.request.model`,
`gen_ai.usage.input_tokens`, `gen_ai.response.finish_reasons`, ...), and `vtoken.request_id`,
`vtoken.num_preemptions`, `vtoken.evicted_tokens`; no text of prompts or answers. A span begins a trace of its own: the
`traceparent` of a client is not taken up.

## What the numbers advise

`vtoken.engine.advice.advise(stats)` reads an engine's counters after a typical load of at least {ENOUGH_REQUESTS}
requests and says what to set otherwise; the server logs it when it stops.

| seen | advice, the likeliest first |
|---|---|
| more than {MANY_PREEMPTIONS:g} preemptions a request | lower `max_num_seqs`; hold KV in fewer bits \
(`kv_cache_dtype`); shorten texts (`max_tokens`, `max_model_len`); let tokens die (`kv_policy`, `kv_budget`); \
raise `kv_memory` |
| preempted requests recomputed because swap space was full | raise `swap_space`; or `preemption="recompute"` |
| never more than {LOW_USE:.0%} of the pool in use | raise `max_num_seqs` and send more at once; lower `kv_memory` |
"""

# Measured on 2026-11-30: one thread of two shared cores.
_COST = """What it costs, in milliseconds of one thread (`python benchmarks/bench_metrics.py --live 16 --model \
smollm2-135m`):

| | median |
|---|---|
| to record a step in which each of 256 sequences gets a token | 0.09 |
| to take a snapshot of them in a pool of 3,072 blocks; once a second at most, and once for each page | 0.4 |
| to render a page, in the reader's thread | 2.6 |
| such a step of the demo model, for comparison | 2,100 |"""


def page() -> str:
    gauges = [metric for metric in METRICS if metric.kind == "gauge"]
    counters = [metric for metric in METRICS if metric.kind == "counter"]
    info = f"| `{INFO_NAME}` | {', '.join(f'`{label}`' for label in INFO_LABELS)} | {INFO_MEANING} | yes |"
    return "\n".join(
        [
            _HEAD.replace("{cost}", _COST),
            _table("Gauges: what is now", ["name", "label", "meaning", "vLLM"], [*map(_row, gauges), info]),
            _table("Counters: what has happened", ["name", "label", "meaning", "vLLM"], map(_row, counters)),
            _table("Histograms", ["name", "meaning", "upper bounds", "vLLM"], map(_histogram, DISTRIBUTIONS)),
        ]
    )


def _table(title: str, columns: list[str], rows: Iterable[str]) -> str:
    return "\n".join([f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows, ""])


def _row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    label = "" if metric.label is None else f"`{metric.label}`"
    return f"| `{name}` | {label} | {metric.meaning} | {_yes(metric.in_vllm)} |"


def _histogram(distribution: Distribution) -> str:
    bounds = distribution.bounds
    told = "1, 2, 5, 10, ... up to max_model_len" if bounds is None else ", ".join(f"{bound:g}" for bound in bounds)
    return f"| `{distribution.name}` | {distribution.meaning} | {told} | {_yes(distribution.in_vllm)} |"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
