from __future__ import annotations

from math import exp

import numpy as np
import pytest

from vtoken.bench.jobs import Workload
from vtoken.bench.workloads import LONG_TASKS, WORKLOADS, LogNormal, make_workload

MANY = 4000


def lengths(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    jobs = workload.jobs
    return np.array([job.num_prompt_tokens for job in jobs]), np.array([job.num_output_tokens for job in jobs])


def spread(values: np.ndarray) -> float:
    return float(np.log(values).std())


def test_lengths_of_a_log_normal_are_its_quantiles() -> None:
    some = LogNormal(median=100, sigma=1.0, least=5, most=1000)
    # One standard deviation up and down is at 84.13 % and 15.87 %.
    shares = np.array([0.5, 0.841344746, 0.158655254, 1e-9, 1 - 1e-9])
    assert some.lengths(shares).tolist() == [100, round(100 * exp(1)), round(100 / exp(1)), 5, 1000]


def test_a_log_normal_of_a_mean_has_it() -> None:
    some = LogNormal.of_mean(338, 1.0, least=1, most=10**9)
    assert some.median == pytest.approx(338 / exp(0.5))
    shares = (np.arange(20_000) + 0.5) / 20_000
    assert some.lengths(shares).mean() == pytest.approx(338, rel=0.01)


def test_chat_has_the_means_that_are_published_for_sharegpt() -> None:
    prompts, answers = lengths(make_workload("chat", seed=0, num_jobs=MANY))
    # 161 and 338 tokens, of which cutting off takes a little.
    assert prompts.mean() == pytest.approx(161, rel=0.05)
    assert answers.mean() == pytest.approx(338, rel=0.07)
    assert spread(prompts) == pytest.approx(0.9, abs=0.05)
    assert spread(answers) == pytest.approx(1.0, abs=0.05)
    assert prompts.max() <= 1024
    assert (prompts + answers).max() <= 2048


def test_long_prompts_are_those_of_longbench_and_answers_what_it_allows() -> None:
    prompts, answers = lengths(make_workload("long", seed=0, num_jobs=MANY))
    words = np.mean([words for words, _ in LONG_TASKS.values()])
    assert len(LONG_TASKS) == 16
    assert prompts.mean() == pytest.approx(words * 4 / 3, rel=0.05)
    assert {32, 64, 128, 512} == set(answers.tolist())
    assert (answers == 512).mean() == pytest.approx(3 / 16, abs=0.03)
    assert prompts.max() <= 31_500


def test_reasoning_answers_are_long_and_prompts_short() -> None:
    prompts, answers = lengths(make_workload("reasoning", seed=0, num_jobs=MANY))
    assert np.median(prompts) == pytest.approx(243, rel=0.05)
    assert np.median(answers) == pytest.approx(856, rel=0.05)
    assert spread(answers) == pytest.approx(0.96, abs=0.08)
    assert answers.min() >= 64
    assert answers.max() <= 4096


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_makes_the_same_jobs_and_another_one_others(name: str) -> None:
    made = make_workload(name, seed=3, num_jobs=20)
    assert made == make_workload(name, seed=3, num_jobs=20)
    assert made.jobs != make_workload(name, seed=4, num_jobs=20).jobs
    assert make_workload(name, seed=3, num_jobs=30).jobs[:20] == made.jobs, "more jobs begin with the fewer"
    assert len(make_workload(name, seed=0).jobs) == WORKLOADS[name].num_jobs


def test_scaled_lengths_are_said_to_be() -> None:
    whole, half = (make_workload("chat", seed=0, num_jobs=5, scale=scale) for scale in (1.0, 0.5))
    assert [job.scaled(0.5) for job in whole.jobs] == list(half.jobs)
    assert "x 0.5" in half.about
    assert " x " not in whole.about
