"""`sample`: the right distribution, whoever the neighbours are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.plans import draws
from vtoken.schedule.plan import SamplingBatch
from vtoken.worker import sampler

V = 50

_way = {"compiled": False}


@pytest.fixture(params=[False, True], ids=["torch", "compiled"], autouse=True)
def way(request: pytest.FixtureRequest) -> None:
    """Every test runs in plain torch and on the compiled kernel."""
    _way["compiled"] = request.param


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[NDArray[np.int32], dict[int, str]]:
    return sampler.sample(logits, batch, compiled=_way["compiled"])


def logits_of(num_rows: int = 1, vocab_size: int = V, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def draw_many(logits: torch.Tensor, num_draws: int, **params: Any) -> NDArray[np.int32]:
    batch = draws([0] * num_draws, **({"temperature": 1.0, "indices": np.arange(num_draws)} | params))
    tokens, errors = sample(logits.expand(num_draws, -1), batch)
    assert not errors
    return tokens


class TestGreedy:
    @pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9, 1e-6, 1e-5, 1e-4, 1e-2])
    def test_tiny_temperatures(self, temperature: float) -> None:  # U64
        logits = logits_of(200)
        tokens, errors = sample(logits, draws(range(200), temperature=temperature, seeds=np.arange(200)))
        top = logits.topk(2, dim=1).values
        clear = (top[:, 0] - top[:, 1] > 0.2).numpy()  # at 1e-2 a closer second would be drawn now and then, rightly
        assert clear.sum() > 100
        assert not errors
        assert (tokens == logits.argmax(dim=1).numpy())[clear | (temperature < 1e-4)].all()

    @pytest.mark.parametrize("temperature", [0.0, 1e-5])
    def test_huge_logits_do_not_overflow(self, temperature: float) -> None:
        logits = torch.tensor([[-3e38, 3e38, 1e38, 0.0]])
        assert sample(logits, draws([0], temperature=temperature))[0].tolist() == [1]

    @pytest.mark.parametrize("temperature", [0.5, 5.0, 1e6])
    def test_top_k_of_one(self, temperature: float) -> None:  # U64
        logits = logits_of(300).round()  # many ties
        greedy, _ = sample(logits, draws(range(300)))
        tokens, _ = sample(logits, draws(range(300), temperature=temperature, top_k=1, seeds=np.arange(300)))
        assert np.array_equal(tokens, greedy)

    def test_the_lowest_index_wins_a_tie(self) -> None:
        logits = torch.zeros(1, V)
        logits[0, [7, 9, 30]] = 1.0
        assert sample(logits, draws([0]))[0].tolist() == [7]

    @pytest.mark.parametrize("params", [{"top_p": 1e-30}, {"min_p": 1.0}])
    def test_limits_that_leave_one(self, params: dict[str, float]) -> None:
        logits = logits_of()
        assert set(draw_many(logits, 100, **params)) == {int(logits.argmax())}


def kept_distribution(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """The definition, in numpy: temperature, min_p, top_k, top_p, each on what the one before left."""
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    if top_p < 1:
        mass_before = np.cumsum(probs[order]) - probs[order]
        probs[order[mass_before >= top_p]] = 0
    return probs / probs.sum()


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 2.0},
    {"top_k": 5},
    {"top_k": V - 1, "temperature": 4.0},
    {"min_p": 0.1},
    {"min_p": 0.02, "temperature": 1.5},
    {"min_p": 0.05, "top_k": 12, "top_p": 0.8, "temperature": 2.0},
]


class TestDistribution:
    @pytest.mark.parametrize("params", PARAMS, ids=str)
    def test_chi_square_against_numpy(self, params: dict[str, Any]) -> None:  # U64
        logits, num_draws = logits_of(seed=3), 4000
        full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
        expected = num_draws * kept_distribution(logits[0].double().numpy(), **full)
        counts = np.bincount(draw_many(logits, num_draws, **params, seeds=11), minlength=V)
        assert not counts[expected == 0].any(), "a token outside the limits was drawn"
        # Rare tokens are pooled, as the test asks for expected counts of 5 and more.
        often = expected >= 5
        observed, wanted = (
            np.append(counts[often], counts[~often].sum()),
            np.append(expected[often], expected[~often].sum()),
        )
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
        statistic, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
        # Wilson and Hilferty's approximation of the chi-square quantile at 0.9999; the draws are fixed by their keys.
        bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert statistic < bound

    def test_choices_and_indices_are_streams_of_their_own(self) -> None:
        flat = torch.zeros(1, 1000)
        by_index = draw_many(flat, 500, seeds=5)
        by_choice = draw_many(flat, 500, seeds=5, indices=0, choices=np.arange(500))
        by_seed = draw_many(flat, 500, indices=0, seeds=np.arange(500))
        for tokens in (by_index, by_choice, by_seed):
            assert len(set(tokens)) > 300
        assert (by_index == by_choice).mean() < 0.05
        assert (by_index == by_seed).mean() < 0.05

    def test_the_same_keys_draw_the_same_token(self) -> None:
        logits = logits_of()
        assert np.array_equal(draw_many(logits, 50, seeds=2**64 - 1), draw_many(logits, 50, seeds=2**64 - 1))

    def test_limits_that_cannot_bind_are_off(self) -> None:
        logits = logits_of()
        plain = draw_many(logits, 300)
        for params in ({"top_k": V}, {"top_k": V + 100}, {"top_p": 1.0}, {"min_p": 0.0}):
            assert np.array_equal(draw_many(logits, 300, **params), plain)

    @pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.99}])
    def test_uniforms_at_the_edges(self, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither 0 nor the number next to 1 may draw a token without mass."""
        logits = torch.full((2, V), -torch.inf)
        logits[:, [4, 9]] = torch.tensor([1.0, 0.5])
        monkeypatch.setattr(sampler, "uniform", lambda *_: np.array([0.0, 1 - 2.0**-53]))
        tokens, _ = sample(logits, draws([0, 1], temperature=1.0, **params))
        assert tokens.tolist() == [4, 9]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Some of torch's reductions split a lone row over the threads, but not the rows of a batch."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


class TestNeighbours:
    @pytest.mark.usefixtures("two_threads")
    @pytest.mark.parametrize("vocab_size", [33, 1000, 49152])
    def test_a_row_alone_and_in_a_batch(self, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Probabilities bit for bit, hence tokens too."""
        if _way["compiled"]:
            pytest.skip("looks into the torch path; the compiled one computes row by row")
        cdfs: list[torch.Tensor] = []
        invert = sampler._invert

        def spy(cdf: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
            cdfs.append(cdf.clone())
            return invert(cdf, uniforms)

        monkeypatch.setattr(sampler, "_invert", spy)
        num_rows, rng = 24, np.random.default_rng(0)
        logits = logits_of(num_rows, vocab_size)
        params = {
            "temperature": rng.choice([0.0, 0.5, 1.0, 2.0], num_rows),
            "top_k": rng.choice([0, 5, 20], num_rows),
            "top_p": rng.choice([1.0, 0.3, 0.95], num_rows),
            "min_p": rng.choice([0.0, 0.05], num_rows),
            "seeds": rng.integers(0, 2**63, num_rows),
            "indices": rng.integers(0, 100, num_rows),
        }
        together, _ = sample(logits, draws(range(num_rows), **params))
        rows_together = [row for cdf in cdfs for row in cdf]
        cdfs.clear()
        for i in range(num_rows):
            alone, _ = sample(logits[i : i + 1].clone(), draws([0], **{name: x[i] for name, x in params.items()}))
            assert alone[0] == together[i]
        assert len(cdfs) == (params["temperature"] > 0).sum() > 10
        for cdf in cdfs:
            assert any(torch.equal(cdf[0], row) for row in rows_together)

    def test_a_batch_larger_than_the_working_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits, batch = logits_of(40), draws(range(40), temperature=1.0, top_k=[0, 7] * 20, seeds=np.arange(40))
        expected, _ = sample(logits, batch)
        monkeypatch.setattr(sampler, "_ELEMENTS_AT_ONCE", 3 * V)
        assert np.array_equal(sample(logits, batch)[0], expected)


def test_both_ways_draw_the_same() -> None:
    """Rows of every kind: the uniform number of none lies within rounding of a boundary."""
    num_rows, rng = 800, np.random.default_rng(1)
    for vocab_size in (7, 50, 3001):
        logits = logits_of(num_rows, vocab_size, seed=vocab_size)
        logits[::3] = logits[::3].round()  # many ties
        logits[::7, ::2] = -torch.inf
        batch = draws(
            range(num_rows),
            temperature=rng.choice([0.0, 0.3, 1.0, 5.0], num_rows),
            top_k=rng.choice([0, 1, 5, 20, 10_000], num_rows),
            top_p=rng.choice([1.0, 0.3, 0.95, 1e-9], num_rows),
            min_p=rng.choice([0.0, 0.05, 1.0], num_rows),
            seeds=rng.integers(0, 2**63, num_rows),
        )
        theirs, _ = sampler.sample(logits, batch)
        ours, _ = sampler.sample(logits, batch, compiled=True)
        assert np.array_equal(ours, theirs)


class TestErrors:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        ("value", "where", "reason"),
        [(torch.nan, 3, "NaN"), (torch.inf, 3, "infinite"), (-torch.inf, slice(None), "ruled out every token")],
    )
    def test_only_the_broken_row_fails(self, temperature: float, value: float, where: Any, reason: str) -> None:  # U77
        logits = logits_of(3)
        batch = draws(range(3), temperature=temperature, seeds=[1, 2, 3])
        expected, _ = sample(logits, batch)
        logits[1, where] = value
        tokens, errors = sample(logits, batch)
        assert list(errors) == [1]
        assert reason in errors[1]
        assert tokens.tolist() == [expected[0], -1, expected[2]]

    def test_some_tokens_may_be_ruled_out(self) -> None:
        logits = torch.full((1, V), -torch.inf)
        logits[0, 5] = 0.0
        assert set(draw_many(logits, 20)) == {5}

    def test_no_draws(self) -> None:
        tokens, errors = sample(torch.zeros(0, V), draws([]))
        assert len(tokens) == 0
        assert errors == {}
