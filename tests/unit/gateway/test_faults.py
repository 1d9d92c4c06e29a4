"""Conversion of errors to OpenAI's JSON and status."""

import inspect

import pytest

from tokenmill import errors
from tokenmill.errors import (
    EngineDied,
    EngineError,
    EngineTimeout,
    NonFiniteLogits,
    RequestRefused,
    StoreFull,
    TokenmillError,
    TooLong,
    UnknownModel,
)
from tokenmill.gateway.http.faults import Busy, GatewayFault, Stopping, error_body, error_headers, param_of, status_of

ALL = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, TokenmillError)]


@pytest.mark.parametrize("cls", ALL)
def test_each_has_an_answer(cls: type[TokenmillError]) -> None:
    made = cls("m", needed_tokens=2, context_tokens=1) if cls is TooLong else cls("m", hint="do this")
    body = error_body(made)["error"]
    assert body["message"].startswith("This model's maximum context" if cls is TooLong else "m")
    assert status_of(made) == cls.http_status
    assert body["source"] == (
        "engine" if isinstance(made, EngineError) else "request" if status_of(made) < 500 else "gateway"
    )


def test_words_for_programs() -> None:
    assert TooLong("m", needed_tokens=2, context_tokens=1).code == "context_length_exceeded"
    assert UnknownModel("m").code == "model_not_found"
    assert EngineDied("m").code == "engine_died"
    assert EngineTimeout("m").code == "timeout"
    assert EngineError("m").code == "engine_error"
    assert RequestRefused("m").code == "invalid_request"


def test_an_engines_last_words_stay_in_the_house() -> None:
    error = EngineDied("it died", hint="its last words, in /var/log/engine.log: secret")
    assert error_body(error)["error"]["message"] == "it died"
    assert error_headers(error) == {"retry-after": "1"}


def test_waiting_is_rounded_up() -> None:
    assert error_headers(Busy("m", retry_after_s=0.2)) == {"retry-after": "1"}
    assert error_headers(Busy("m", retry_after_s=7.01)) == {"retry-after": "8"}
    assert error_headers(GatewayFault("m", status=502)) == {}
    assert status_of(Stopping()) == 503


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature: must be", "temperature"),
        ("messages[0].role must be", "messages"),
        ("prompt is wrong", None),
        ("a b: c", None),
        ("9: x", None),
        ("tool_choice.type: must be", "tool_choice"),
        ("the prompt has 9 tokens and the context 8: 1 too many", None),
        ("the JSON schema is no JSON: x[0]", None),
    ],
)
def test_the_key_is_found_in_the_message(message: str, param: str | None) -> None:
    assert param_of(RequestRefused(message)) == param
    assert param_of(RequestRefused(message, param="stop")) == "stop"
    assert param_of(TokenmillError(message)) is None


def test_a_prompt_that_is_too_long_is_told_in_words_that_clients_look_for() -> None:
    error = error_body(TooLong("the prompt has 9 tokens", needed_tokens=10, context_tokens=8, hint="h"))["error"]
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 8 tokens" in error["message"].lower()  # LiteLLM's condition


@pytest.mark.parametrize(
    ("error", "may_help"),
    [
        (Busy("m", retry_after_s=7.0), True),
        (Busy("the tokens of the day", retry_after_s=7200.0), False),
        (EngineDied("m"), True),
        (EngineError("m"), True),
        (NonFiniteLogits("m"), False),
        (Stopping(), True),
        (GatewayFault("m", status=409), False),
        (GatewayFault("m", status=501), False),
        (StoreFull("m"), False),
        (RequestRefused("m"), False),
    ],
)
def test_clients_do_not_retry_what_cannot_help(error: TokenmillError, *, may_help: bool) -> None:
    assert ("x-should-retry" not in error_headers(error)) is may_help
