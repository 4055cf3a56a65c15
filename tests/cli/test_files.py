"""Files that findings go to: looked at before the work, and named when they cannot be written after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtoken.base.errors import ConfigError
from vtoken.cli.files import check_place, write


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    check_place(tmp_path / "found.json", "--json")
    with pytest.raises(ConfigError, match="--json: .* is a folder; give the name of a file in it"):
        check_place(tmp_path, "--json")
    with pytest.raises(ConfigError, match="--json: .*nowhere/x cannot be written: its folder does not exist"):
        check_place(tmp_path / "nowhere" / "x", "--json")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json: .*nowhere/x cannot be written: No such file"):
        write(tmp_path / "nowhere" / "x", "", "--json")
    with pytest.raises(ConfigError, match=r"--json: /dev/full cannot be written: No space left on device"):
        write(Path("/dev/full"), "found", "--json")
