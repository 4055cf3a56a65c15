"""Names: what is exported, what is documented, what the dashboard asks for, and what vLLM calls the same things."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import metrics_page
from tests.server.metered import make_engine
from vtoken import AsyncLLM
from vtoken.server.metrics import VLLM_PREFIX, Metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "vtoken.json"
COMMON = {"model_name", "engine"}

# vLLM's V1 engine (vllm/v1/metrics/loggers.py and docs/design/metrics.md): family -> (type, labels of its own).
VLLM = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "kv_cache_usage_perc": ("gauge", set()),
    "cache_config_info": ("gauge", {"block_size", "num_gpu_blocks", "num_cpu_blocks"}),
    "prefix_cache_queries": ("counter", set()),
    "prefix_cache_hits": ("counter", set()),
    "num_preemptions": ("counter", set()),
    "prompt_tokens": ("counter", set()),
    "prompt_tokens_by_source": ("counter", {"source"}),
    "generation_tokens": ("counter", set()),
    "request_success": ("counter", {"finished_reason"}),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "request_time_per_output_token_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_inference_time_seconds": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_decode_time_seconds": ("histogram", set()),
    "request_prompt_tokens": ("histogram", set()),
    "request_prefill_kv_computed_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
    "request_max_num_generation_tokens": ("histogram", set()),
    "request_params_n": ("histogram", set()),
    "request_params_max_tokens": ("histogram", set()),
    "iteration_tokens_total": ("histogram", set()),
}
_GAPS = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
_PHASES = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
_TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0"  # up to max_model_len=192 here
VLLM_BOUNDS = {
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 "
    "40.0 80.0 160.0 640.0 2560.0",
    "inter_token_latency_seconds": _GAPS,
    "request_time_per_output_token_seconds": _GAPS,
    "e2e_request_latency_seconds": _PHASES,
    "request_queue_time_seconds": _PHASES,
    "request_inference_time_seconds": _PHASES,
    "request_prefill_time_seconds": _PHASES,
    "request_decode_time_seconds": _PHASES,
    "request_prompt_tokens": _TOKENS,
    "request_prefill_kv_computed_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_max_tokens": _TOKENS,
    "request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0",
}


def exported(prefix):
    llm = AsyncLLM.from_engine(make_engine())
    try:
        text = Metrics(llm, prefix, model_name="m").render()[0].decode()
        return {family.name: family for family in text_string_to_metric_families(text)}
    finally:
        llm.close()


@pytest.fixture(scope="module")
def families():
    return exported("vtoken:")


@pytest.fixture(scope="module")
def labels_of(families):
    """Sample name, as a query has it -> its labels."""
    found = {}
    for family in families.values():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_with_vllms_prefix_the_names_are_vllms():
    families = exported(VLLM_PREFIX)
    for name, (kind, labels) in VLLM.items():
        family = families[VLLM_PREFIX + name]
        assert family.type == kind, name
        found = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert found == COMMON | labels, name
    for name, bounds in VLLM_BOUNDS.items():
        samples = families[VLLM_PREFIX + name].samples
        assert [each.labels["le"] for each in samples if each.name.endswith("_bucket")] == [*bounds.split(), "+Inf"]
    assert VLLM_BOUNDS.keys() == {name for name, (kind, _) in VLLM.items() if kind == "histogram"}


def test_every_name_has_the_prefix_and_only_that_differs(families):
    assert all(name.startswith("vtoken:") for name in families)
    assert {name.removeprefix("vtoken:") for name in families} == {
        name.removeprefix("vllm:") for name in exported("vllm:")
    }
    assert set(exported("")) == {name.removeprefix("vtoken:") for name in families}


def test_every_name_keeps_the_customs(families):
    for name, family in families.items():
        assert family.documentation.endswith("."), name
        assert re.fullmatch(r"vtoken:[a-z0-9]+(_[a-z0-9]+)*", name), name
        assert not re.search(r"_(ms|milliseconds|mb|kb)(_|$)", name), f"{name}: base units, seconds and bytes"
        assert all(set(sample.labels) >= COMMON for sample in family.samples), name


def test_the_page_is_that_of_the_list(families):
    text = metrics_page.PAGE.read_text(encoding="utf-8")
    assert text == metrics_page.page(), (
        "docs/metrics.md is behind the list; write it anew with: python -m tests.metrics_page"
    )
    rows = re.findall(r"^\| `(\w+)` \| .* \| (yes|) \|$", text, re.MULTILINE)
    told = {name for name, _ in rows}
    assert told == {
        name.removeprefix("vtoken:") + ("_total" if family.type == "counter" else "")
        for name, family in families.items()
    }
    assert len(rows) == len(told)
    shared = {name + ("_total" if kind == "counter" else "") for name, (kind, _) in VLLM.items()}
    assert {name for name, in_vllm in rows if in_vllm} == shared


# --- the dashboard ----------------------------------------------------------------------------------------------------

# What a query of ours may hold that is not a metric.
WORDS = {"rate", "sum", "max", "min", "by", "without", "histogram_quantile"}


def panels():
    return [panel for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]


def queries():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_what_is_exported(query, labels_of):
    rest = query
    for name, selector in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", query):
        assert name in labels_of, f"{name} is not exported"
        conditions = dict(re.findall(r'(\w+)=~?"([^"]*)"', selector))
        assert conditions.keys() <= labels_of[name], selector
        assert conditions["model_name"] == "$model_name"
        rest = rest.replace(f"{name}{{{selector}}}", "")
        if not name.endswith(("_total", "_bucket", "_sum", "_count")):
            assert f"{name}{{{selector}}}[" not in query, f"rate of a gauge: {name}"
        else:
            assert f"{name}{{{selector}}}[$__rate_interval]" in query, f"a counter needs its rate: {name}"
    names = re.findall(r"[a-zA-Z_:][\w:]*:[\w:]*", query)
    assert names, "it asks for nothing"
    grouped = {label for group in re.findall(r"(?:by|without) \(([^)]*)\)", rest) for label in group.split(", ")}
    assert grouped <= set().union(*(labels_of[name] for name in names))
    rest = rest.replace("[$__rate_interval]", "")
    assert set(re.findall(r"[a-zA-Z_:][\w:]*", rest)) <= WORDS | grouped, "names without a selector, or other functions"
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows(panel, labels_of):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert f"by ({label})" in target["expr"], "a legend names a label that the query keeps"
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)


def test_the_dashboard_holds_together(labels_of):
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert all(x < 24 for x, _ in cells)
        assert not cells & taken, f"{panel['title']!r} lies on another panel"
        taken |= cells
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables.keys() == {"datasource", "model_name"}
    assert re.fullmatch(r"label_values\(([\w:]+), model_name\)", variables["model_name"]["definition"])[1] in labels_of


def test_the_dashboard_shows_what_no_other_engine_exports():
    asked = " ".join(queries())
    for name in (
        *("kv_cells", "kv_blocks_retained", "kv_blocks_floor", "kv_blocks_partly_used", "tokens_evicted_total"),
        *("ladder_blocks_total", "reclaim_decisions_total", "copied_bytes_total", "copy_wait_seconds_total"),
    ):
        assert f"vtoken:{name}{{" in asked
