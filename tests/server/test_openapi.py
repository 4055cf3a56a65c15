"""The OpenAPI page says what is true: whatever it allows, or does not, gets an answer that it describes."""

from __future__ import annotations

import re

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.serving import serve, until

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
ROUTES = r"/(v1/.*|tokenize|detokenize|health|live|ping|version|load)"


@pytest.fixture(scope="session")
def page(folder):
    """A server with short answers, so that many requests take little time."""
    with serve(folder, {"max_model_len": 64, "num_blocks": 64}) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        until(server.is_idle)
        server.ask(lambda engine: engine.scheduler.check())


def run(schema, mode: GenerationMode, num_examples: int) -> None:
    """`num_examples` requests to each route."""
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [operation for operation in operations if re.fullmatch(ROUTES, operation.path)]
    assert len(operations) >= 10
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # any text is a name of a model

        @settings(max_examples=num_examples if operation.body else 5, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            case.call_and_validate(checks=CHECKS, timeout=30)

        ask()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_what_the_page_says(page, mode):
    run(page, mode, 25)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_what_the_page_says_at_length(page, mode):
    run(page, mode, 500)
