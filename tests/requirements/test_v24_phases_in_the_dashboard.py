"""V24: the phases plan, copy, switch-and-return are visible in the dashboard.

Its frames tell every event of the log, in order, and between them the blocks change hands as they say. That the browser
shows them: tests/server/test_dashboard_browser.py.
"""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from tests.eviction_log import shrinking_driver
from vtoken.engine.engine import Engine, EngineFacts
from vtoken.memory.block_map import BLOCK, PINNED
from vtoken.server.dashboard.frames import EVENT, FrameEncoder, Observer


@pytest.mark.parametrize("beside_delay", [None, 3])
def test_frames_tell_every_phase_and_show_what_it_does_to_the_blocks(beside_delay: int | None) -> None:
    driver = shrinking_driver("h2o", 20, [60, 50, 7, 33], beside_delay=beside_delay)
    facts = EngineFacts(vocab_size=driver.vocab_size, bos_token_id=None, bytes_per_block=1, weight_bytes=1)
    engine, observer, encoder = Engine(driver.scheduler, driver.sim, facts), Observer(), FrameEncoder()
    told: list[dict[str, Any]] = []
    cells = np.zeros(driver.num_blocks, BLOCK)
    num_pinned = num_returned = 0
    while driver.scheduler.num_unfinished or driver.memory.moves:
        driver.step()
        frame = json.loads(encoder.encode(observer.look(engine)).data)
        blocks = frame["blocks"]
        before = cells.copy()
        if "all" in blocks:
            cells = np.frombuffer(b64decode(blocks["all"]), BLOCK).copy()
        else:
            cells[np.frombuffer(b64decode(blocks["at"]), "<u4")] = np.frombuffer(b64decode(blocks["cells"]), BLOCK)
        events = [dict(zip(EVENT, event, strict=True)) for event in frame["events"]]
        told += events
        # While copies run beside the steps, the blocks at both ends are shown as pinned; afterwards none is.
        assert ((cells["flags"] & PINNED) > 0).any() == bool(driver.memory.moves)
        num_pinned += bool(driver.memory.moves)
        # A map that was switched when its copy had ended, apart from any plan: blocks have no holder any more.
        returned = sum(event["blocks"] for event in events if event["phase"] == "return")
        if returned and not any(event["phase"] == "plan" for event in events):
            assert ((before["refs"] > 0) & (cells["refs"] == 0)).any()
            num_returned += 1
    logged = [(e.step, e.decision, e.phase, e.lane, e.tokens, e.blocks) for e in driver.memory.decisions.events]
    assert [tuple(event[name] for name in EVENT[:6]) for event in told] == logged
    assert {event["phase"] for event in told} >= {"plan", "copy", "return"}
    if beside_delay is not None:
        assert min(num_pinned, num_returned) > 0
