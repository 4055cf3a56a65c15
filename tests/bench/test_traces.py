from __future__ import annotations

import json
from pathlib import Path

import pytest

from vtoken.base.errors import ConfigError
from vtoken.bench.jobs import Job
from vtoken.bench.traces import count_by_words, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.1805900,396,109
2023-11-16 18:15:51.6805900,0,55
2023-11-16 18:16:46.6805900,91,16
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 12, "output_length": 7, "hash_ids": [0]}

{"timestamp": 4500, "input_length": 40, "output_length": 3, "hash_ids": []}
"""
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "unasked"}]},
    {"id": "c", "conversations": []},
    {
        "id": "d",
        "conversations": [
            {"from": "system", "value": "be short"},
            {"from": "human", "value": "a b c d e f"},
            {"from": "gpt", "value": "g h i"},
            {"from": "human", "value": "never read"},
        ],
    },
    {"messages": [{"role": "user", "content": "x y z"}, {"role": "assistant", "content": "v w q"}]},
]


def write(folder: Path, text: str, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_rows_arrive_when_they_did(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.jobs == (Job(0.0, 374, 44), Job(3.5, 396, 109), Job(60.0, 91, 16))
    assert trace.name == "trace"
    assert "Azure" in trace.about
    assert "1 without a prompt or an answer left out" in trace.about
    assert "arriving as recorded" in trace.about


def test_mooncake_rows_are_in_milliseconds(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert trace.jobs == (Job(0.0, 6758, 500), Job(0.0, 12, 7), Job(1.5, 40, 3))
    assert "Mooncake" in trace.about


def test_sharegpt_takes_the_first_question_and_its_answer(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, json.dumps(SHAREGPT)))
    assert trace.jobs == (Job(0.0, 4, 1), Job(0.0, 8, 4), Job(0.0, 4, 4)), "words x 4/3"
    assert "words x 4/3" in trace.about
    assert "2 without a prompt or an answer left out" in trace.about


def test_sharegpt_lengths_are_the_tokenizers_where_there_is_one(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, json.dumps(SHAREGPT[:1])), count_tokens=len)
    assert trace.jobs == (Job(0.0, len("one two three"), len("four")),)
    assert "the model's tokenizer" in trace.about


def test_words_count_a_third_more() -> None:
    assert count_by_words("  one\ntwo three  ") == 4
    assert count_by_words("") == 0


def test_a_trace_can_be_cut_scaled_and_let_in_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE)
    assert read_trace(path, limit=2, scale=0.5, at_once=True).jobs == (Job(0.0, 187, 22), Job(0.0, 198, 54))
    assert "all at once" in read_trace(path, at_once=True).about


def test_the_name_of_the_file_does_not_matter(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, MOONCAKE, "azure.csv")).jobs[0] == Job(0.0, 6758, 500)
    assert read_trace(write(tmp_path, "\ufeff\n" + AZURE, "mooncake.jsonl")).jobs[0] == Job(0.0, 374, 44)


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    lines = MOONCAKE.replace("3000", "9000", 1).splitlines()
    assert [job.num_prompt_tokens for job in read_trace(write(tmp_path, "\n".join(lines))).jobs] == [12, 40, 6758]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        ("what is this?", "is in no known format; known: Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens)"),
        ("time,in,out\n1,2,3\n", "is in no known format"),
        ('{"a": 1}', "is in no known format"),
        (AZURE.splitlines()[0], "holds no request with a prompt and an answer"),
        ("[]", "holds no request"),
        (AZURE.replace("396", "many"), "line 3: ContextTokens: expected a number of tokens, got 'many'"),
        (AZURE.replace(",109", ",-1"), "line 3: GeneratedTokens: expected a number of tokens, got '-1'"),
        (AZURE.replace(",109", ""), "line 3: expected 3 columns"),
        (AZURE.replace(",109", ",109,7"), "line 3: expected 3 columns"),
        (
            AZURE.replace("2023-11-16 18:16:46.6805900", "noon"),
            "line 5: TIMESTAMP: expected a date and time, got 'noon'",
        ),
        ("\n\n" + AZURE.replace("396", "many"), "line 5: ContextTokens"),
        (
            MOONCAKE.replace('"input_length": 40', '"input_length": "40 tokens"'),
            "line 4: input_length: expected a number",
        ),
        (MOONCAKE.replace('"input_length": 40', '"input_length": 40.5'), "line 4: input_length: expected a number"),
        (MOONCAKE.replace(', "output_length": 3', ""), "line 4: output_length: missing"),
        (MOONCAKE.replace("4500", "-1"), "line 4: timestamp: expected milliseconds, got -1"),
        (MOONCAKE + "[1, 2]\n", "line 5: expected a JSON object, got [1, 2]"),
        (MOONCAKE + '{"timestamp": \n', "line 5: no JSON: Expecting value"),
        ('[{"conversations": [}', "line 1: no JSON"),
        ("[\n{}\n]", "conversation 0: conversations: expected a list, got None"),
        ("[7]", "conversation 0: conversations: expected a list"),
        ('[{"conversations": [{"from": "human"}]}]', "conversation 0, turn 0: expected an object with the texts"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(write(tmp_path, text))
    assert str(caught.value).startswith(f"trace: {tmp_path / 'trace.txt'}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [1, 2, 4])
def test_a_field_longer_than_csv_takes_is_said_with_its_line(tmp_path: Path, line: int) -> None:
    lines = AZURE.splitlines()
    lines[line - 1] += "," + "9" * 200_000
    with pytest.raises(ConfigError, match=rf"trace: .*, line {line}: no CSV: field larger than field limit"):
        read_trace(write(tmp_path, "\n".join(lines)))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_trace(tmp_path / "binary")
