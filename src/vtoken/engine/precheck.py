"""What can be told to be wrong with an engine's settings before anything large is imported or loaded. No torch."""

from __future__ import annotations

from vtoken.base.config import EngineConfig
from vtoken.base.errors import ConfigError, RequestError
from vtoken.models.resolve import resolve_model
from vtoken.policies.registry import resolve_policy
from vtoken.schedule.retention import KEEPS_ALL, RetentionSettings


def precheck(config: EngineConfig) -> None:
    """Raise ConfigError or CheckpointError, in a fraction of a second, for a model that is not there and for settings
    of eviction that cannot work. Whoever has torch loaded anyway may leave it out."""
    default_retention(config)
    resolve_model(config.model)


def default_retention(config: EngineConfig) -> RetentionSettings:
    """What requests keep that say nothing of it. Raises ConfigError for what cannot work on any model."""
    policy = None if config.kv_policy is None else resolve_policy(config.kv_policy)
    settings = RetentionSettings(
        policy, config.kv_budget, config.kv_trigger, config.kv_stride, config.kv_prefill_stride
    )
    if policy is None and config.kv_budget is None:  # requests may bring their own
        return settings
    try:
        retention = settings.resolve(KEEPS_ALL, config.block_size)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    assert retention is not None, "there is a policy, and a budget"
    if isinstance(retention.budget, int):
        retention.policy.check_budget(retention.budget)
    return settings
