"""Words that never come up, and a request's own functions, in the whole engine: the same whatever the memory does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import save_llama
from tests.tiny_tokenizers import byte_fallback, byte_level, save
from vtoken import LLM, SamplingParams
from vtoken.base.errors import RequestError
from vtoken.engine.bad_words import tokens_of
from vtoken.engine.text import Tokenizer

MEMORIES: list[dict[str, Any]] = [
    {"num_blocks": 17},
    {"num_blocks": 17, "preemption": "swap", "swap_space": "1MiB"},
    {"max_num_batched_tokens": 13, "max_num_seqs": 8},
    {"attention_backend": "reference"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_level()
    folder = save_llama(tmp_path_factory.mktemp("words"), vocab_size=len(tokenizer) + 8)
    return save(tokenizer, folder)


def answers(folder: Path, params: SamplingParams, **settings: Any) -> list[list[tuple[list[int], str]]]:
    common = {"num_blocks": 80, "block_size": 8, "max_model_len": 96}
    prompts = ["the quick brown fox " * 2, "she sells", "the lazy dog jumps", "the quick brown"]
    with LLM(str(folder), **(common | settings)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if settings.get("num_blocks") == 17:
            assert llm.stats().scheduler.preemptions > 0
        assert not any(output.error for output in outputs)
        return [[(choice.token_ids, choice.text) for choice in output.outputs] for output in outputs]


def test_a_word_is_spelled_at_the_start_and_behind_a_space() -> None:
    tokenizer = Tokenizer(byte_level())
    for word, bare in (("the", "the"), (" the", "the"), ("  the", "the"), ("fox jumps", "fox jumps"), ("  ", "  ")):
        expected = {tuple(tokenizer.encode_plain(text)) for text in (bare, " " + bare)}
        assert set(tokens_of([word], tokenizer)) == expected
    # What sentencepiece puts in front of a text is part of how it spells a word, its special tokens are not.
    fallback = Tokenizer(byte_fallback())
    assert set(tokens_of(["the"], fallback)) == {
        tuple(fallback.encode_plain("the")),
        tuple(fallback.encode_plain(" the")),
    }
    assert not any(fallback.bos_token_id in tokens for tokens in tokens_of(["the", "好"], fallback))
    # A character that the vocabulary lacks is spelled in bytes, and a run of them is what is forbidden.
    assert max(map(len, tokens_of(["ß"], fallback))) > 1


def test_words_that_came_up_come_up_no_more(folder: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, n=2, ignore_eos=True)
    free = answers(folder, params)
    tokenizer = Tokenizer(byte_level())
    runs = [tokens[at : at + length] for [(tokens, _), *_] in free for at, length in ((1, 2), (6, 3), (9, 1), (15, 2))]
    # Such runs that are the spelling of their text, as those of a real model are.
    words = [tokenizer.decode(run) for run in runs if tokenizer.encode_plain(tokenizer.decode(run)) == run]
    assert len(words) >= 3
    forbidden = set(tokens_of(words, tokenizer))
    assert max(map(len, forbidden)) > 1

    def comes_up(answer: list[int]) -> bool:
        return any(tuple(answer[i : i + len(word)]) == word for word in forbidden for i in range(len(answer)))

    assert any(comes_up(tokens) for output in free for tokens, _ in output)
    banned = params.replace(bad_words=words)
    found = answers(folder, banned)
    assert not any(comes_up(tokens) for output in found for tokens, _ in output)
    for settings in MEMORIES:
        assert answers(folder, banned, **settings) == found, settings


@pytest.mark.parametrize("words", ["", [""], ["a", 3], ["\ud800"], b"a", 7])
def test_what_is_no_word_is_refused(words: Any) -> None:
    with pytest.raises(RequestError, match="^bad_words: expected a text that is not empty") as caught:
        SamplingParams(bad_words=words)
    assert caught.value.field == "bad_words"


def test_a_text_without_tokens_is_refused() -> None:
    class Mute(Tokenizer):
        def encode_plain(self, text: str) -> list[int]:
            return []

    with pytest.raises(RequestError, match="^bad_words: 'x' has no tokens in this vocabulary"):
        tokens_of(["x"], Mute(byte_level()))


class Lengthens:
    """Depends on prompt and answer, so it shows whether both are right after a preemption."""

    def __call__(self, prompt: list[int], answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[(sum(prompt) + sum(answer) + 31 * len(answer)) % len(logits)] += 20
        return logits


def test_functions_see_the_same_texts_whatever_the_memory_does(folder: Path) -> None:
    seen: list[int] = []

    def watches(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(len(answer))
        return logits

    params = SamplingParams(
        max_tokens=24, temperature=1.0, seed=5, n=2, ignore_eos=True, logits_processors=[Lengthens(), watches]
    )
    expected = answers(folder, params)
    assert expected != answers(folder, params.replace(logits_processors=None))
    assert sorted(seen) == sorted([*range(24)] * 8)
    for settings in MEMORIES:
        assert answers(folder, params, **settings) == expected, settings


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_function_that_fails_ends_its_own_request_alone(folder: Path, backend: str) -> None:
    def fails_late(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(answer) == 5:
            raise LookupError("nothing in the table")
        return logits

    good = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), num_blocks=80, block_size=8, max_model_len=96, attention_backend=backend) as llm:
        [alone] = llm.generate("she sells", good, use_tqdm=False)
        bad = good.replace(logits_processors=fails_late, n=2, temperature=1.0)
        failed, fine = llm.generate(["the fox", "she sells"], [bad, good], use_tqdm=False)
        assert failed.error == "logits_processors: function 0 (fails_late) raised LookupError: nothing in the table"
        assert {choice.finish_reason for choice in failed.outputs} == {"error"}
        assert [len(choice.token_ids) for choice in failed.outputs] == [5, 5]
        assert fine.outputs[0].token_ids == alone.outputs[0].token_ids
        assert llm.stats().scheduler.failed_steps == 0
