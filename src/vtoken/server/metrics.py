"""`Metrics`: an engine as Prometheus sees it, and the route that shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import accumulate
from threading import Lock

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vtoken.base.clock import Clock
from vtoken.base.errors import ConfigError, EngineError
from vtoken.engine.async_llm import AsyncLLM
from vtoken.server.metric_list import (
    DISTRIBUTIONS,
    INFO_LABELS,
    INFO_MEANING,
    INFO_NAME,
    METRICS,
    Distribution,
    Metric,
    Moment,
    read_info,
)
from vtoken.server.openapi import refusals
from vtoken.server.settings import METRICS_PREFIX, METRICS_PREFIX_EXPECTED, METRICS_PREFIX_PATTERN
from vtoken.server.step_recorder import HistogramState, Snapshot, StepRecorder

VLLM_PREFIX = "vllm:"  # for dashboards made for vLLM
COMMON_LABELS = ("model_name", "engine")
WAIT_SECONDS = 0.5  # for the end of a step; then what was seen last is told


class Metrics(Collector):
    """Reads an engine's own counters when it is asked, so nothing is counted twice; only distributions are kept here.

    All of one answer is of one moment between two steps. While a step runs on for longer than `wait` seconds, or hangs,
    or the engine has died, the last moment that was seen is told again, with its age.

    Args:
        prefix: of all names; `vllm:` gives those of vLLM where the meaning is the same.
        model_name: value of the label `model_name`.
        registry: where to register, with metrics of your own perhaps; None: one that is empty.

    Raises ConfigError for a prefix that no name can begin with.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        prefix: str = METRICS_PREFIX,
        *,
        model_name: str = "",
        registry: CollectorRegistry | None = None,
        wait: float = WAIT_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        if not re.fullmatch(METRICS_PREFIX_PATTERN, prefix):
            raise ConfigError(f"metrics_prefix: expected {METRICS_PREFIX_EXPECTED}, got {prefix!r}")
        self.registry = registry or CollectorRegistry()
        self._llm = llm
        self._prefix = prefix
        self._wait = wait
        self._labels = (model_name, "0")
        self._recorder = StepRecorder(llm.engine.scheduler.config.max_model_len, clock)
        self._asked: Future[Snapshot] | None = None  # one question at a time: a step that hangs gathers no more
        self._lock = Lock()
        llm.add_step_listener(self._recorder)
        self._look()
        self.registry.register(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """(text, content type), in the form that the Accept header of a request asks for. Takes `wait` seconds at most,
        and may be called by several threads."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> Iterator[Family]:
        """The names, without asking the engine."""
        yield self._info()
        for metric in METRICS:
            yield self._values(metric)
        for distribution in DISTRIBUTIONS:
            yield self._distribution(distribution)

    def collect(self) -> Iterator[Family]:
        self._look()
        snapshot = self._recorder.latest
        if snapshot is None:  # a step has been hanging ever since the start
            yield from self.describe()
            return
        llm, age = self._llm, self._recorder.clock.now() - snapshot.time
        moment = Moment(snapshot.stats, llm.is_alive, llm.last_step_age, max(0.0, age), llm.num_refused)
        yield self._info(moment)
        for metric in METRICS:
            yield self._values(metric, moment)
        for distribution in DISTRIBUTIONS:
            yield self._distribution(distribution, snapshot.histograms[distribution.name])

    def _look(self) -> None:
        """Have the engine looked at, and wait for it, but not for long."""
        try:
            with self._lock:
                if self._asked is None or self._asked.done():
                    self._asked = self._llm.call_in_engine(self._recorder.take)
                asked = self._asked
            asked.result(self._wait)
        except (FutureTimeout, EngineError):
            pass  # the age of what is told says so, and engine_alive

    # Each without values where no moment is given.

    def _info(self, moment: Moment | None = None) -> Family:
        family = GaugeMetricFamily(self._prefix + INFO_NAME, INFO_MEANING, labels=(*COMMON_LABELS, *INFO_LABELS))
        if moment is not None:
            family.add_metric((*self._labels, *read_info(moment)), 1)
        return family

    def _values(self, metric: Metric, moment: Moment | None = None) -> Family:
        kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        own = () if metric.label is None else (metric.label,)
        family = kind(self._prefix + metric.name, metric.meaning, labels=(*COMMON_LABELS, *own))
        if moment is not None:
            value = metric.read(moment)
            if isinstance(value, Mapping):
                for label, number in value.items():
                    family.add_metric((*self._labels, label), number)
            else:
                family.add_metric(self._labels, value)
        return family

    def _distribution(self, distribution: Distribution, state: HistogramState | None = None) -> Family:
        family = HistogramMetricFamily(self._prefix + distribution.name, distribution.meaning, labels=COMMON_LABELS)
        if state is not None:
            bounds = (*(str(float(bound)) for bound in state.bounds), "+Inf")
            family.add_metric(self._labels, list(zip(bounds, accumulate(state.counts), strict=True)), state.total)
        return family


def metrics_router(metrics: Metrics) -> APIRouter:
    """`GET /metrics`. The endpoint is no coroutine, so that its wait holds up a thread and not the event loop."""
    router = APIRouter(tags=["operation"])

    @router.get("/metrics", response_class=PlainTextResponse, responses=refusals(401, 405))
    def show(request: Request) -> Response:
        """The metrics of docs/metrics.md, in Prometheus' text form or in OpenMetrics."""
        text, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    return router
