"""Requests as OpenTelemetry spans."""

from __future__ import annotations

import gzip
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.server.metered import make_engine
from vtoken import AsyncLLM, ConfigError, SamplingParams
from vtoken.base.clock import ManualClock
from vtoken.server.app import create_app
from vtoken.server.settings import ServerSettings
from vtoken.server.tracing import RequestTracer, otlp_provider

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

PARAMS = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=6, n=2, ignore_eos=True)


def trace(engine, at_step=None):
    """(seconds on the clock of the wall when it began, spans by request and name)"""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, "m")
    num_steps = 0
    while engine.has_unfinished_requests():
        if at_step is not None:
            at_step(num_steps)
        tracer(engine, engine.step())
        num_steps += 1
    spans = exporter.get_finished_spans()
    roots = {span.context.span_id: span.attributes["vtoken.request_id"] for span in spans if span.parent is None}
    found = {name: {} for name in roots.values()}
    for span in spans:
        owner = span.context.span_id if span.parent is None else span.parent.span_id
        found[roots[owner]]["whole" if span.parent is None else span.name] = span
    assert len({span.context.trace_id for span in spans}) == len(roots)
    return found


def test_a_span_for_each_request_and_one_for_each_phase():
    clock = ManualClock(50.0)
    engine = make_engine(100, clock=clock)
    engine.executor.seconds = lambda step: 1.0
    engine.add_request("a", [9] * 40, PARAMS)
    clock.advance(3.0)
    spans = trace(engine)["a"]
    whole = spans["whole"]
    assert whole.name == "text_completion m"
    assert whole.kind is SpanKind.SERVER
    assert whole.status.status_code is StatusCode.UNSET
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    # 40 tokens are two steps of 32; then six tokens, one of them with the prompt's end.
    assert seconds == pytest.approx({"whole": 10, "queue": 3, "prefill": 2, "decode": 5})
    assert abs(whole.end_time / 1e9 - time.time()) < 30
    assert spans["queue"].start_time == whole.start_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert spans["decode"].end_time == whole.end_time
    told = dict(whole.attributes)
    assert told["gen_ai.request.model"] == "m"
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.choice.count"]) == (6, 2)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (40, 12)
    assert told["gen_ai.response.finish_reasons"] == ("length", "length")


def test_requests_that_did_not_come_to_their_end():
    engine = make_engine(100, max_num_seqs=1)

    def before(plan):
        if plan.step == 3:
            raise RuntimeError("planted")

    engine.executor.before = before
    for name in "abc":
        engine.add_request(name, [9] * 4, PARAMS.replace(n=1))
    found = trace(engine, lambda step: step == 1 and engine.abort_request("b"))
    assert found["a"]["whole"].status.status_code is StatusCode.ERROR
    assert found["a"]["whole"].attributes["error.type"] == "request_failed"
    assert found["a"]["whole"].attributes["gen_ai.usage.output_tokens"] == 3
    assert found["b"].keys() == {"whole", "queue"}  # it never ran
    assert found["b"]["whole"].attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert found["c"].keys() == {"whole", "queue", "prefill", "decode"}


def test_spans_go_to_the_collector_that_was_named():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        provider = otlp_provider(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        engine, tracer = make_engine(), RequestTracer(provider, "m")
        engine.add_request("mine", [9] * 4, PARAMS)
        while engine.has_unfinished_requests():
            tracer(engine, engine.step())
        provider.shutdown()
        collector.shutdown()
    [(path, body)] = got
    assert path == "/v1/traces"
    body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    for word in (b"text_completion m", b"queue", b"prefill", b"decode", b"mine"):
        assert word in body


def test_without_the_packages_the_server_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    llm = AsyncLLM.from_engine(make_engine())
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: .* pip install 'vtoken\[otel\]'"):
        create_app(llm, ServerSettings(otlp_traces_endpoint="http://localhost:4318/v1/traces"))
    llm.close()


@pytest.mark.parametrize("endpoint", ["localhost:4317", "", "ftp://x/y"])
def test_an_endpoint_is_an_address(endpoint):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint: expected an address"):
        ServerSettings(otlp_traces_endpoint=endpoint)
