from __future__ import annotations

from collections.abc import Iterator

import pytest

from vtoken.policies import registry


@pytest.fixture(autouse=True)
def no_policy_is_remembered() -> Iterator[None]:
    """Policies that a test installs are gone after it."""
    yield
    registry._third_party.cache_clear()
