from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.base.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 * 1024**2),
        (" 1.5 gib ", 3 * 1024**3 // 2),
        ("0.1GB", 100_000_000),
        ("2tb", 2 * 10**12),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_that_people_write(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "512Mi", "512 M", "1.GB", "one GB", "0.5", "1GB 2", "١GBx"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size|whole number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["x" * 10**5, "0." + "3" * 1000])
def test_a_long_text_is_refused_in_short(text: str) -> None:
    with pytest.raises(ValueError, match="size|whole number of bytes") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (100 * 1024, "100 KiB"),
        (512 * 1024**2, "512 MiB"),
        (int(1.25 * 1024**3), "1.25 GiB"),
        (5000 * 1024**4, "5,000 TiB"),
    ],
)
def test_sizes_that_people_read(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 2**70))
def test_plain_bytes_survive(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes
