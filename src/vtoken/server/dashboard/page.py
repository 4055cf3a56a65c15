"""The page: one HTML document with its style and its script inside, and the header that forbids it anything else."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

# In this order, in one script.
_SCRIPTS = ("frames.js", "colours.js", "blocks.js", "lines.js", "requests.js", "tokens.js", "events.js", "main.js")


@cache
def page() -> tuple[str, str]:
    """(the document, its Content-Security-Policy)"""
    folder = files("vtoken.server.dashboard") / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    scripts = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{scripts}\n}})();\n'
    document = (folder / "page.html").read_text(encoding="utf-8")
    document = document.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return document, policy


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
