"""Policies by name: ours, and those of installed packages under the entry point group `vtoken.policies`."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

from vtoken.base.entry_points import find_entry_points, load_class, package_of
from vtoken.base.errors import ConfigError, describe
from vtoken.base.registry import suggest
from vtoken.base.validation import shorten
from vtoken.policies.base import Policy, check_policy
from vtoken.policies.parameters import defaults_of, read_parameters

GROUP: Final = "vtoken.policies"

# Import paths, so that naming one imports no other.
BUILT_IN: Final = {
    "random": "Random",
    "streaming_llm": "StreamingLLM",
    "h2o": "H2O",
    "scissorhands": "Scissorhands",
    "tova": "TOVA",
    "snapkv": "SnapKV",
    "knorm": "Knorm",
    "keydiff": "KeyDiff",
    "expected_attention": "ExpectedAttention",
    "rkv": "RKV",
    "lagkv": "LagKV",
    "paged_eviction": "PagedEviction",
}

_ONE_TABLE: Final = "one token table serves all heads and layers here"
_PER_HEAD: Final = f"it keeps other tokens, or another number of them, in each head; {_ONE_TABLE}"
_PER_LAYER: Final = f"it keeps another number of tokens in each layer; {_ONE_TABLE}"
# What people know from elsewhere and cannot have: name without case, - and _ -> why.
REFUSED: Final = {
    "adakv": _PER_HEAD,
    "adasnapkv": _PER_HEAD,
    "headkv": _PER_HEAD,
    "duoattention": _PER_HEAD,
    "razorattention": _PER_HEAD,
    "fastgen": _PER_HEAD,
    "dms": f"it is trained, with the model, to decide in each head; {_ONE_TABLE}",
    "pyramidkv": _PER_LAYER,
    "pyramidinfer": _PER_LAYER,
    "squeezeattention": _PER_LAYER,
    "dynamickv": _PER_LAYER,
    "cake": _PER_LAYER,
    "simlayerkv": "it treats some layers in another way than the rest; " + _ONE_TABLE,
    "think": "it drops channels of keys, not tokens",
    "quest": "it chooses what each query reads and gives up no token",
    "kvzip": "it reads the prompt a second time to see what is needed to repeat it",
    "cam": "it merges tokens, which changes values of those that stay",
    "d2o": "it merges tokens, which changes values of those that stay",
}


@dataclass(frozen=True)
class PolicyEntry:
    """A policy that can be named, or one that would if it were not broken."""

    name: str
    package: str | None  # distribution and version it comes from; None = vtoken
    policy: Policy | None  # with its defaults
    error: str | None = None  # why it cannot be used

    @property
    def about(self) -> str:
        """The first paragraph of its class's docstring, in one line; "" if it has none."""
        of = type(self.policy)
        written = inspect.cleandoc(of.__doc__ or "").partition("\n\n")[0]
        # Without one, a dataclass is given its signature.
        return "" if self.policy is None or written.startswith(f"{of.__name__}(") else " ".join(written.split())

    @property
    def parameters(self) -> dict[str, Any]:
        """What may be set behind its name, and the defaults."""
        return {} if self.policy is None else dict(defaults_of(type(self.policy)))

    @property
    def own_parameters(self) -> dict[str, Any]:
        """Those of `parameters` that not every policy has."""
        return {name: value for name, value in self.parameters.items() if name not in defaults_of(Policy)}


def resolve_policy(spec: str | Policy) -> Policy:
    """The policy that a user means: a name, `"name:parameter=value,parameter=value"`, or an instance.

    Raises ConfigError, which says what was expected: for an unknown name, one that cannot be served here, an unknown or
    bad parameter, and a policy of another package that cannot be loaded.
    """
    if isinstance(spec, Policy):
        return _checked(spec, f"kv_policy {type(spec).__qualname__}")
    # Who names the field in front of these, as the scheduler does, should not have it twice.
    if inspect.isclass(spec) and issubclass(spec, Policy):
        raise ConfigError(f"got the class {spec.__qualname__} as kv_policy; give an instance: {spec.__qualname__}()")
    if not isinstance(spec, str):
        raise ConfigError(f"expected a policy's name or a Policy as kv_policy, got {shorten(spec)}")
    name, has_parameters, text = (part.strip() for part in spec.partition(":"))
    owner = f"kv_policy {name!r}"
    of = policy_class(name)
    return _make(of, read_parameters(of, text, owner) if has_parameters else {}, owner)


def policy_class(name: str) -> type[Policy]:
    """The class that a name stands for. Raises ConfigError as `resolve_policy` does."""
    if name in BUILT_IN:
        found: type[Policy] = getattr(import_module(f"vtoken.policies.{name}"), BUILT_IN[name])
        return found
    plain = _plain(name)
    if plain in REFUSED:
        raise ConfigError(f"kv_policy {name!r} cannot be had: {REFUSED[plain]}")
    return _third_party(name)


def list_policies() -> list[PolicyEntry]:
    """All that can be named: ours first, then those of packages in order of name, the broken ones with their errors."""
    entries = [PolicyEntry(name, None, _make(policy_class(name), {}, name)) for name in BUILT_IN]
    points, unreadable = find_entry_points(GROUP)
    for point in sorted(points, key=lambda point: (point.name, package_of(point))):
        try:
            if point.name in BUILT_IN:
                raise ConfigError("the name is taken by a policy of vtoken")
            policy = _make(policy_class(point.name), {}, f"kv_policy {point.name!r}")
            entries.append(PolicyEntry(point.name, package_of(point), policy))
        except ConfigError as error:
            entries.append(PolicyEntry(point.name, package_of(point), None, str(error)))
    entries += [PolicyEntry("?", package, None, why) for package, why in sorted(unreadable.items())]
    return entries


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def _make(of: type[Policy], parameters: dict[str, Any], owner: str) -> Policy:
    missing = [name for name, default in defaults_of(of).items() if default is MISSING and name not in parameters]
    if missing:
        raise ConfigError(f"{owner}: needs {', '.join(f'{name}=...' for name in missing)}")
    try:
        policy = of(**parameters)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a policy may be anybody's
        raise ConfigError(f"{owner} cannot be made: {describe(error)}") from error
    return _checked(policy, owner)


def _checked(policy: Policy, owner: str) -> Policy:
    """A policy whose class may have left out the check when it was made."""
    try:
        check_policy(policy)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"{owner} cannot be checked: {describe(error)}") from error
    return policy


@cache  # looking through all installed packages takes milliseconds, and a request may name its policy
def _third_party(name: str) -> type[Policy]:
    """Load a policy by its entry point."""
    offered, unreadable = find_entry_points(GROUP)
    points = [point for point in offered if point.name == name]
    if not points:
        known = [*BUILT_IN, *sorted({point.name for point in offered})]
        same = [each for each in known if _plain(each) == _plain(name)]
        hint = f"did you mean {same[0]!r}? " if same else suggest(name, known)
        missing = "".join(f"; {package}: {why}" for package, why in sorted(unreadable.items()))
        raise ConfigError(f"unknown kv_policy {name!r}; {hint}known: {', '.join(known)}{missing}")
    found = load_class(points, Policy, f"kv_policy {name!r}", ConfigError)  # type: ignore[type-abstract]
    own = getattr(found, "name", None)
    if own != name:
        package = package_of(points[0])
        raise ConfigError(f"kv_policy {name!r} of {package} calls itself {own!r}; both names must agree")
    return found
