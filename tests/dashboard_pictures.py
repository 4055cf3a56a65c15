"""Takes the pictures of the dashboard that README and docs show: a real model, eviction at work.

    python -m tests.dashboard_pictures

Needs the demo model (`make demo` gets it), chromium and chromedriver.
"""

from __future__ import annotations

import asyncio
import random
import time
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.server.dashboard_site import Load, browser, set_screen, site, wait_until
from vtoken import AsyncLLM, SamplingParams

FOLDER = Path(__file__).parents[1] / "docs" / "images"
MODEL = "smollm2-135m"
QUESTIONS = (
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "Write a short story about a lighthouse keeper and a lost whale.",
    "Explain to a child how bread rises.",
    "What did people use before there were clocks?",
    "Describe the life of a river from its spring to the sea.",
    "Why do cats purr?",
)
ENGINE = {
    "num_blocks": 72,
    "max_model_len": 700,
    "max_num_seqs": 12,
    "seed": 0,
    "kv_policy": "h2o",
    "kv_budget": 96,
    "kv_trigger": "always",
    "kv_stride": 48,
}


class Questions(Load):
    """People who ask a chat model, one after the other."""

    _questions = cycle(QUESTIONS)

    async def _ask(self, llm: AsyncLLM, number: int, rng: random.Random) -> None:
        await asyncio.sleep(0.6 * (number % 9))  # or all would be as old as each other
        prompt = llm.get_tokenizer().encode_chat([{"role": "user", "content": next(self._questions)}])
        n = 3 if number % 9 == 4 else 1
        params = SamplingParams(temperature=0.7, seed=number, max_tokens=rng.randint(120, 420), n=n)
        async for _ in llm.generate(prompt, params, request_id=f"chat-{number}", output_kind="delta"):
            pass


def num_holes(driver: Any) -> int:
    return int(driver.execute_script("return document.querySelectorAll('#tiles span')[4].textContent"))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with site(MODEL, Questions(10), name=MODEL, **ENGINE) as url, browser() as driver:
        set_screen(driver, 1280, 985)
        driver.get(url)

        def opened() -> bool:
            """Whether a request is open that runs, has lost some hundred tokens and has scores; else tries one."""
            driver.execute_script(
                "const row = [...document.querySelectorAll('#requests tbody tr')].find((row) => "
                "row.children[1].textContent === 'running' && Number(row.children[5].textContent) > 110 && "
                "Number(row.children[4].textContent) < 170);"
                "if (row) row.querySelector('button').click()"
            )
            time.sleep(1)
            return "score of" in driver.find_element("id", "shade-means").text

        wait_until(lambda: driver.find_elements("css selector", "#events .phase[data-phase=return]"), 120)
        time.sleep(60)  # until the lines have something to show
        wait_until(lambda: num_holes(driver) > 60, 120)
        driver.save_screenshot(str(FOLDER / "dashboard.png"))
        wait_until(opened, 120)
        time.sleep(2.5)
        driver.execute_script("document.activeElement.blur(); document.getElementById('pause').click()")
        set_screen(driver, 1280, 1600)
        time.sleep(1)
        driver.find_element("id", "tokens-panel").screenshot(str(FOLDER / "dashboard-tokens.png"))
        driver.execute_script("document.getElementById('close-tokens').click(); document.activeElement.blur()")
        set_screen(driver, 390, 1100, dark=True)
        driver.execute_script("document.getElementById('live').click(); scrollTo(0, 0)")
        time.sleep(2)
        driver.save_screenshot(str(FOLDER / "dashboard-narrow-dark.png"))
    for picture in FOLDER.glob("dashboard*.png"):
        size = picture.stat().st_size
        print(f"{picture.relative_to(FOLDER.parents[1])}: {size // 1000} kB")
        assert size < 300_000, "too large for a repository"


if __name__ == "__main__":
    main()
