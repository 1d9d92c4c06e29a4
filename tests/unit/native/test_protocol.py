"""Requests arrive unchanged at the native worker."""

import pytest

from tokenmill.engine.engine import Chat, Request, Sampling
from tokenmill.native import protocol

MESSAGES = ({"role": "system", "content": "é"}, {"role": "user", "content": [{"type": "text", "text": "\ud800"}]})
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
EVERY_SAMPLING = Sampling(
    temperature=0.0,
    top_k=0,
    top_p=0.9,
    min_p=0.05,
    repeat_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    penalty_last_n=-1,
    seed=(1 << 63) - 1,
    logit_bias=((7, -100.0), (9, 0.5)),
    top_logprobs=0,
    grammar="",
    json_schema="{}",
)


@pytest.mark.parametrize(
    "request_",
    [
        Request("text"),
        Request(""),
        Request(()),
        Request((1, 2, 3), max_tokens=0),
        Request(Chat(MESSAGES)),
        Request(Chat(MESSAGES, (TOOL,), "required", {"enable_thinking": False})),
        Request(
            Chat(MESSAGES, (TOOL,), {"type": "function", "function": {"name": "f"}}),
            EVERY_SAMPLING,
            max_tokens=5,
            stop=("\n", "end"),
            ignore_eos=True,
            priority="interactive",
            timeout_s=0.5,
            slot=0,
            extra={"parallel_tool_calls": False},
        ),
    ],
)
def test_a_request_arrives_as_it_was_sent(request_: Request) -> None:
    message = protocol.read(protocol.line({"submit": 7, "request": protocol.request_message(request_)}))
    assert protocol.request_of(message["request"]) == request_


def test_every_field_is_covered() -> None:
    assert all(getattr(EVERY_SAMPLING, name) is not None for name in Sampling.__slots__)


def test_unset_fields_do_not_travel() -> None:
    assert protocol.request_message(Request("text")) == {
        "prompt": "text",
        "sampling": {},
        "ignore_eos": False,
        "priority": "batch",
    }


@pytest.mark.parametrize(
    "message",
    [
        None,
        7,
        [],
        {},
        {"prompt": "a", "sampling": None},
        {"prompt": "a", "sampling": {"heat": 1}},
        {"prompt": "a", "sampling": {"logit_bias": [1]}},
        {"prompt": "a", "sampling": {}, "colour": "red"},
        {"prompt": "a", "sampling": {}, "stop": 7},
        {"prompt": {}, "sampling": {}},
        {"prompt": {"messages": 7}, "sampling": {}},
    ],
)
def test_a_foreign_message_is_malformed(message: object) -> None:
    with pytest.raises(protocol.MALFORMED):
        protocol.request_of(message)  # type: ignore[arg-type]
