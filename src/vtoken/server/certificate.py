"""The certificate of HTTPS, looked at before anything else is begun."""

from __future__ import annotations

import ssl
from pathlib import Path

from vtoken.base.errors import ConfigError
from vtoken.server.settings import ServerSettings


class _LockedKeyError(Exception):
    """A key that wants a password, for which OpenSSL would ask at the terminal."""


def check_certificate(settings: ServerSettings) -> None:
    """Raise ConfigError, which names the setting, for files of which uvicorn could make no HTTPS."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        return
    _check_readable(certificate, "ssl_certfile")
    if key is not None:
        _check_readable(key, "ssl_keyfile")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"ssl_certfile: there is no certificate in PEM form in {certificate!r}") from None
    where = f"ssl_certfile: {certificate!r} holds" if key is None else f"ssl_keyfile: {key!r} holds"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, _refuse)
    except _LockedKeyError:
        raise ConfigError(f"{where} a key with a password, which nobody could type at a restart; take it off") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{where} a private key of another certificate than {certificate!r}") from None
        missing = "; give its file in ssl_keyfile" if key is None else ""
        raise ConfigError(f"{where} no private key in PEM form that can be used{missing}") from None


def _check_readable(path: str, field: str) -> None:
    try:
        Path(path).open("rb").close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: the file {path!r} cannot be read: {getattr(error, 'strerror', error)}") from None


def _refuse() -> str:
    raise _LockedKeyError
