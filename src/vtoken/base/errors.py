"""Every error a user of vtoken can meet.

VtokenError
├── ConfigError        the engine cannot start as asked; also a ValueError
├── CheckpointError    a model folder or file is missing, damaged or of an unknown kind
├── RequestError       one request is wrong; `.field` names the parameter; also a ValueError
│   ├── CapacityError  the request could never fit, even into an empty pool
│   └── QueueFullError too many requests wait already; later it may be taken
├── EngineError        the engine itself failed while it ran a request
│   └── PolicyError    (vtoken.policies.victims) a policy failed to score tokens, or scored them with what is no score
└── InvariantError     a book contradicts itself: a bug of ours, raised by `check()`; also an AssertionError
"""


class VtokenError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(VtokenError, ValueError):
    """The engine cannot start with these settings."""


class CheckpointError(VtokenError):
    """A model's files cannot be used as they are."""


class RequestError(VtokenError, ValueError):
    """One request is refused; no other request is touched.

    `field` is the name of the parameter at fault, or None when the request as a whole is.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(RequestError):
    """The request could never fit, even if it were alone."""


class QueueFullError(RequestError):
    """More requests wait than the engine was told to let wait. Nothing is wrong with this one: try it later."""


class EngineError(VtokenError):
    """A step failed and took a request with it."""


class InvariantError(VtokenError, AssertionError):
    """The books contradict themselves."""


def describe(error: BaseException) -> str:
    """One line about an error of any kind, even one that cannot describe itself."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
