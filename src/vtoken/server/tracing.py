"""`RequestTracer`: each request as an OpenTelemetry span, with its time in the queue, on the prompt and on the answer.

Names follow OpenTelemetry's conventions for generative AI; what they have no name for begins with `vtoken.`. No text of
a prompt or an answer is told. The packages are those of the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vtoken.base.errors import ConfigError
from vtoken.engine.engine import Engine
from vtoken.engine.outputs import RequestOutput
from vtoken.schedule.sequence import FinishReason, Request

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

Attribute = str | int | float | list[str]


class RequestTracer:
    """A step listener that tells a request when it has ended, about 0.1 ms each; sending is another thread's."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._tracer = provider.get_tracer("vtoken")
        self._model_name = model_name

    def __call__(self, engine: Engine, outputs: list[RequestOutput]) -> None:
        step = engine.last_step
        if step.finished:
            epoch = time.time() - step.time  # where the engine's clock stands at 0
            for request in step.finished:
                self._tell(request, epoch)

    def _tell(self, request: Request, epoch: float) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        assert request.finish_time is not None, "it has ended"
        span = self._tracer.start_span(
            f"text_completion {self._model_name}",
            Context(),
            SpanKind.SERVER,
            dict(self._attributes(request)),
            start_time=_nanoseconds(epoch + request.arrival_time),
        )
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, request.error))
        inside = set_span_in_context(span, Context())
        times = (request.arrival_time, request.first_scheduled_time, request.first_token_time, request.finish_time)
        begun = [each for each in times if each is not None]
        ends = [*begun[1:-1], begun[-1]]
        for name, start, end in zip(("queue", "prefill", "decode"), begun, ends, strict=False):
            child = self._tracer.start_span(name, inside, start_time=_nanoseconds(epoch + start))
            child.end(_nanoseconds(epoch + end))
        span.end(_nanoseconds(epoch + request.finish_time))

    def _attributes(self, request: Request) -> Iterator[tuple[str, Attribute]]:
        params, sequences = request.params, request.sequences
        yield "gen_ai.operation.name", "text_completion"
        yield "gen_ai.provider.name", "vtoken"
        yield "gen_ai.request.model", self._model_name
        yield "gen_ai.response.model", self._model_name
        yield "gen_ai.request.temperature", params.temperature
        yield "gen_ai.request.top_p", params.top_p
        yield "gen_ai.request.top_k", params.top_k
        yield "gen_ai.request.frequency_penalty", params.frequency_penalty
        yield "gen_ai.request.presence_penalty", params.presence_penalty
        if params.max_tokens is not None:
            yield "gen_ai.request.max_tokens", params.max_tokens
        if params.n != 1:
            yield "gen_ai.request.choice.count", params.n
        yield "gen_ai.usage.input_tokens", request.num_prompt_tokens
        yield "gen_ai.usage.output_tokens", sum(sequence.num_output_tokens for sequence in sequences)
        yield "gen_ai.usage.cache_read.input_tokens", request.num_cached_tokens
        reasons = [sequence.finish_reason for sequence in sequences if sequence.finish_reason is not None]
        yield "gen_ai.response.finish_reasons", [reason.value for reason in reasons]
        if FinishReason.ERROR in reasons:
            yield "error.type", "request_failed"
        yield "vtoken.request_id", request.request_id
        yield "vtoken.num_preemptions", request.num_preemptions
        yield "vtoken.evicted_tokens", sum(len(sequence.died_at) for sequence in sequences)


def otlp_provider(endpoint: str) -> TracerProvider:
    """Sends spans to an OTLP collector over HTTP, such as http://localhost:4318/v1/traces, some at a time; what is left
    goes when the program ends. Raises ConfigError without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider as Provider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "otlp_traces_endpoint: needs OpenTelemetry's packages; install them with: pip install 'vtoken[otel]'"
        ) from None
    provider = Provider(resource=Resource.create({SERVICE_NAME: "vtoken"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
