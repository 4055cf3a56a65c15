from __future__ import annotations

from vtoken.bench.jobs import Job, Workload, shaped


def test_scaling_multiplies_both_lengths_and_keeps_a_token_of_each() -> None:
    assert Job(3.0, 100, 41).scaled(0.25) == Job(3.0, 25, 10)
    assert Job(0.0, 1, 1).scaled(0.01) == Job(0.0, 1, 1)
    assert Job(0.0, 4, 2, (7, 8, 9, 6)).scaled(0.5).prompt_token_ids == (7, 8)


def test_jobs_come_in_the_order_of_their_arrival() -> None:
    jobs = [Job(2.0, 1, 1), Job(1.0, 2, 2)]
    assert shaped(jobs) == (Job(1.0, 2, 2), Job(2.0, 1, 1))
    assert [job.arrival for job in shaped(jobs, at_once=True)] == [0.0, 0.0]


def test_made_up_prompts_differ_from_the_first_token_on_and_repeat_for_the_same_seed() -> None:
    first, second = (Job(0.0, 50, 1).token_ids(index, seed=1, vocab_size=1000) for index in (0, 1))
    assert len(first) == 50
    assert all(0 <= token < 1000 for token in first)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 5
    assert first == Job(0.0, 50, 9).token_ids(0, seed=1, vocab_size=1000)
    assert first != Job(0.0, 50, 9).token_ids(0, seed=2, vocab_size=1000)


def test_a_job_keeps_the_prompt_it_brings() -> None:
    assert Job(0.0, 3, 1, (5, 6, 7)).token_ids(4, seed=0, vocab_size=10) == [5, 6, 7]


def test_a_workload_knows_its_lengths() -> None:
    workload = Workload("w", "", (Job(0.0, 10, 2), Job(0.0, 20, 30)))
    assert (workload.longest, workload.mean_prompt, workload.mean_output) == (50, 15.0, 16.0)
