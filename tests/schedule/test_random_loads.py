"""Random loads: whatever comes together, every answer is the plain model's, everything ends, and nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.schedule.scenarios import Scenario, ScenarioRun, scenarios

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=40, suppress_health_check=_CHECKS)
@given(scenario=scenarios())
def test_any_load(scenario: Scenario) -> None:
    ScenarioRun(scenario).play()


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=_CHECKS)
@given(scenario=scenarios(max_requests=16))
def test_any_load_for_long(scenario: Scenario) -> None:
    ScenarioRun(scenario).play()
