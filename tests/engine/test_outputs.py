from __future__ import annotations

from vtoken.engine.outputs import CompletionOutput, RequestOutput


def test_a_request_carries_the_first_error_of_its_choices() -> None:
    fine = CompletionOutput(0, "a", [1], "stop")
    failed = CompletionOutput(1, "", [], "error", error="logits are not finite")
    assert RequestOutput("r", None, [1], [fine]).error is None
    assert RequestOutput("r", None, [1], [fine, failed]).error == "logits are not finite"


def test_a_choice_is_finished_when_it_has_a_reason() -> None:
    assert not CompletionOutput(0, "", []).finished
    assert CompletionOutput(0, "", [], "length").finished
