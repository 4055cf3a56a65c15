"""What the docs show is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import settings_page

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    # Paths from the root of the project, in code marks; <...> and * stand for names to be chosen.
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[^`<*\s]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize(
    ("page", "names"), [("README.md", ("first", "client", "budget")), ("docs/python.md", ("steps", "stream", "evict"))]
)
def test_examples_are_shown_as_they_are(page: str, names: tuple[str, ...]) -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    for name, block in zip(names, shown, strict=True):
        assert (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").endswith("\n\n" + block), name


def test_the_settings_page_is_that_of_the_fields() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), (
        "docs/settings.md is behind the fields; write it anew with: python -m tests.settings_page"
    )
