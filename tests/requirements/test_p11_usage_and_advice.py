"""P11: a metric for KV usage, and an adviser that reads the counters."""

from __future__ import annotations

from dataclasses import replace

from tests.server.metered import load, make_engine
from vtoken.engine.advice import advise


def stats_after(engine, count=30):
    for ask in load(count):
        engine.add_request(str(ask.number), ask.prompt, ask.params)
    usages = []
    while engine.has_unfinished_requests():
        engine.step()
        usages.append(engine.stats().usage.used_fraction)
    return engine.stats(), max(usages)


def test_frequent_preemption_asks_for_less_at_once_fewer_bits_or_shorter_texts() -> None:
    stats, most = stats_after(make_engine(30))
    assert stats.scheduler.preemptions > 3
    assert most > 0.9
    [advice] = advise(stats)
    assert advice.finding.startswith(f"{stats.scheduler.preemptions} preemptions for 30 requests")
    for word in ("lower max_num_seqs (now 8)", "kv_cache_dtype", "max_model_len", "kv_budget", "kv_memory"):
        assert any(word in remedy for remedy in advice.remedies), word
    assert advice.remedies[0].startswith("lower max_num_seqs")


def test_a_pool_that_is_never_used_asks_for_more_at_once() -> None:
    stats, most = stats_after(make_engine(2000))
    assert most < 0.5
    [advice] = advise(stats)
    assert advice.finding.startswith("never more than ")
    assert advice.remedies == ("raise max_num_seqs (now 8) and send more at once", "lower kv_memory")
    assert str(advice) == f"{advice.finding}: {advice.remedies[0]}; or {advice.remedies[1]}"


def test_swap_space_that_is_too_small() -> None:
    stats, _ = stats_after(make_engine(30, num_host_blocks=4))
    assert stats.scheduler.swap_fallbacks > 0
    assert any("swap space was full" in advice.finding for advice in advise(stats))


def test_a_good_fit_and_a_short_load_get_no_advice() -> None:
    stats, most = stats_after(make_engine(30))
    calm = replace(stats, scheduler=replace(stats.scheduler, preemptions_recompute=3))
    assert most > 0.5
    assert advise(calm) == []
    short, _ = stats_after(make_engine(2000), count=5)
    assert advise(short) == []
