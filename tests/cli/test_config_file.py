"""What a YAML file says: text as it is written, or an error in one line."""

from __future__ import annotations

import pytest

from vtoken.base.errors import ConfigError
from vtoken.cli.config_file import read_options

NAMES = {name: name for name in ("port", "api_key", "dashboard")}


@pytest.mark.parametrize("written", ["0123", "1e5", "no", "2024-13-45", "1_000", "0x10", "8000", "12:30:45", "true"])
def test_values_stay_as_they_are_written(tmp_path, written):
    """A key that YAML reads as a number would let in who guesses that number, and shut out who has the key."""
    file = tmp_path / "options.yaml"
    file.write_text(f"port: {written}\napi-key: [{written}, a]\ndashboard:\n")
    assert read_options(file, NAMES) == {"port": written, "api_key": [written, "a"]}


@pytest.mark.parametrize(
    "text", ["api-key: [a, null]", "api-key: [[a]]", "port: !!timestamp 2024-13-45", "port: !!int x"]
)
def test_values_that_are_none(tmp_path, text):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"options\.yaml'"):
        read_options(file, NAMES)
