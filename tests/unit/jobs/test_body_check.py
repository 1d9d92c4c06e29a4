"""Bodies in: every key known by name, wrong ones named, nothing dropped silently."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Chat, Request, Sampling
from tokenmill.errors import RequestRefused
from tokenmill.jobs.openai.call import Endpoint, check, check_request, stored_call
from tokenmill.jobs.openai.requests import ChatJob, CompletionJob

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(**keys: Any) -> Request:
    return check("chat", {"messages": HELLO, **keys}).request()


def completion(**keys: Any) -> Request:
    return check("completion", {"prompt": "once", **keys}).request()


# As OpenAI's API reference lists them; each must be known, whether it can be answered or not.
OPENAI_CHAT = [
    "messages",
    "model",
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "modalities",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
]
OPENAI_COMPLETION = [
    "model",
    "prompt",
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
]


def test_every_key_of_openai_is_known() -> None:
    assert set(OPENAI_CHAT) <= set(ChatJob.__struct_fields__)
    assert set(OPENAI_COMPLETION) <= set(CompletionJob.__struct_fields__)


@pytest.mark.parametrize("key", sorted({*OPENAI_CHAT} - {"messages"}))
def test_null_is_absence(key: str) -> None:
    assert check("chat", {"messages": HELLO, key: None}) == check("chat", {"messages": HELLO})


@pytest.mark.parametrize(
    ("keys", "sampling"),
    [
        ({"temperature": 1}, Sampling(temperature=1.0)),
        (
            {"temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
            Sampling(temperature=0.0, top_p=0.9, top_k=40, min_p=0.05),
        ),
        ({"top_k": -1}, Sampling(top_k=0)),
        ({"seed": 7}, Sampling(seed=7)),
        ({"seed": 7.0}, Sampling(seed=7)),
        ({"seed": -1}, Sampling()),
        ({"presence_penalty": -2, "frequency_penalty": 2}, Sampling(presence_penalty=-2.0, frequency_penalty=2.0)),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, Sampling(repeat_penalty=1.1, penalty_last_n=64)),
        ({"repetition_penalty": 1.1, "penalty_last_n": -1}, Sampling(repeat_penalty=1.1, penalty_last_n=-1)),
        ({"logit_bias": {"50256": -100, "7": 5}}, Sampling(logit_bias=((7, 5.0), (50256, -100.0)))),
        ({"logit_bias": {}}, Sampling()),
        ({"logprobs": True}, Sampling(top_logprobs=0)),
        ({"logprobs": True, "top_logprobs": 3}, Sampling(top_logprobs=3)),
        ({"logprobs": False, "top_logprobs": 0}, Sampling()),
        ({"response_format": {"type": "text"}}, Sampling()),
        ({"response_format": {"type": "json_object"}}, Sampling(json_schema="{}")),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            Sampling(json_schema='{"type":"array"}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}}},
            Sampling(json_schema='{"b":1,"a":2}'),
        ),
        ({"json_schema": {"type": "object"}}, Sampling(json_schema='{"type":"object"}')),
        ({"grammar": 'root ::= "a"'}, Sampling(grammar='root ::= "a"')),
        (
            {
                "n": 1,
                "user": "me",
                "metadata": {"a": "b"},
                "store": False,
                "service_tier": "flex",
                "verbosity": "medium",
                "modalities": ["text"],
                "prompt_cache_key": "k",
                "stream": False,
                "functions": [],
            },
            Sampling(),
        ),
    ],
)
def test_sampling(keys: dict[str, Any], sampling: Sampling) -> None:
    assert chat(**keys).sampling == sampling


@pytest.mark.parametrize(
    ("keys", "attribute", "value"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 5, "max_tokens": 5}, "max_tokens", 5),
        ({"stop": "\n"}, "stop", ("\n",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": []}, "stop", ()),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"timeout": 30}, "timeout_s", 30.0),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "extra", {"parallel_tool_calls": False}),
        ({"tools": [TOOL], "parallel_tool_calls": True}, "extra", {}),
        ({"parallel_tool_calls": False}, "extra", {}),
    ],
)
def test_request(keys: dict[str, Any], attribute: str, value: Any) -> None:
    assert getattr(chat(**keys), attribute) == value


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Chat((HELLO[0],))),
        ({"tools": [TOOL]}, Chat((HELLO[0],), (TOOL,))),
        ({"tools": [TOOL], "tool_choice": "auto"}, Chat((HELLO[0],), (TOOL,))),
        ({"tools": [TOOL], "tool_choice": "required"}, Chat((HELLO[0],), (TOOL,), "required")),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            Chat((HELLO[0],), (TOOL,), {"type": "function", "function": {"name": "look"}}),
        ),
        ({"tools": [], "tool_choice": "none"}, Chat((HELLO[0],))),
        ({"chat_template_kwargs": {"a": 1}}, Chat((HELLO[0],), template_arguments={"a": 1})),
        ({"reasoning_effort": "high"}, Chat((HELLO[0],), template_arguments={"reasoning_effort": "high"})),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"a": 1}},
            Chat((HELLO[0],), template_arguments={"enable_thinking": False, "a": 1}),
        ),
    ],
)
def test_conversation(keys: dict[str, Any], expected: Chat) -> None:
    assert chat(**keys).prompt == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("text", "text"), (["text"], "text"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ("", "")],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


def test_completion_logprobs_are_a_number() -> None:
    assert completion(logprobs=2).sampling.top_logprobs == 2
    assert completion(logprobs=0).sampling.top_logprobs == 0
    assert completion(echo=False, best_of=1, suffix="").sampling == Sampling()


RICH = [
    {"role": "system", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]


def test_nulls_in_messages_are_dropped() -> None:
    prompt = check("chat", {"messages": RICH}).prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[1] == {"role": "assistant", "tool_calls": [{"id": "1"}]}


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("chat", {}, "messages"),
        ("completion", {}, "prompt"),
        ("chat", {"messages": HELLO, "temperatur": 1}, "temperatur"),
        ("chat", {"messages": HELLO, "temperature": "hot"}, "temperature"),
        ("chat", {"messages": HELLO, "temperature": True}, "temperature"),
        ("chat", {"messages": HELLO, "temperature": -0.1}, "temperature"),
        ("chat", {"messages": HELLO, "top_p": 1.1}, "top_p"),
        ("chat", {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ("chat", {"messages": HELLO, "max_tokens": -1}, "max_tokens"),
        (
            "chat",
            {"messages": HELLO, "max_completion_tokens": -1},
            "max_completion_tokens",
        ),
        ("completion", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("chat", {"messages": HELLO, "n": -1}, "n"),
        ("chat", {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"messages": HELLO, "top_k": -2}, "top_k"),
        ("chat", {"messages": HELLO, "seed": -(1 << 63) - 1}, "seed"),
        ("chat", {"messages": HELLO, "max_tokens": 2.5}, "max_tokens"),
        (
            "chat",
            {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3},
            "max_completion_tokens",
        ),
        ("chat", {"messages": HELLO, "seed": 1 << 63}, "seed"),
        ("chat", {"messages": HELLO, "n": 2}, "n"),
        ("chat", {"messages": HELLO, "stream": True}, "stream"),
        ("chat", {"messages": HELLO, "stop": ["a", ""]}, "stop"),
        ("chat", {"messages": HELLO, "stop": ["a"] * 65}, "stop"),
        ("chat", {"messages": HELLO, "logit_bias": {"the": 1}}, "logit_bias"),
        ("chat", {"messages": HELLO, "logit_bias": {"1": 101}}, "logit_bias"),
        ("chat", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ("chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format"),
        ("chat", {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
        ("chat", {"messages": HELLO, "grammar": "x", "json_schema": {}}, "grammar"),
        ("chat", {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (
            "chat",
            {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ("chat", {"messages": HELLO, "tools": [{"type": "retrieval"}]}, "tools"),
        ("chat", {"messages": HELLO, "functions": [{}]}, "functions"),
        ("chat", {"messages": HELLO, "audio": {"voice": "x"}}, "audio"),
        ("chat", {"messages": HELLO, "modalities": ["audio"]}, "modalities"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "hello"}, "messages"),
        ("chat", {"messages": [{"role": "user"}]}, "messages"),
        ("chat", {"messages": [*HELLO, {"role": "usr", "content": "x"}]}, "messages"),
        ("chat", {"messages": [{"role": ["user"], "content": "x"}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x", "nmae": "me"}]}, "messages"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x", "tool_call_id": 5}]}, "messages"),
        ("chat", {"messages": ["hello"]}, "messages"),
        ("chat", {"messages": [*HELLO, None]}, "messages"),
        ("chat", {"messages": [{}]}, "messages"),
        ("chat", {"messages": [{"role": "", "content": "x"}]}, "messages"),
        ("chat", {"messages": [{"role": 7, "content": "x"}]}, "messages"),
        ("chat", {"messages": [{"role": "assistant"}]}, "messages"),
        ("chat", {"messages": [{"role": "tool", "tool_calls": [1]}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": []}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x", "name": 7}]}, "messages"),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": True}]},
            "messages",
        ),
        ("chat", {"messages": [{"role": "assistant", "content": "", "tool_calls": "f"}]}, "messages"),
        ("chat", {"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, "tools"),
        ("chat", {"messages": HELLO, "tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ("completion", {"prompt": ["a", "b"]}, "prompt"),
        ("completion", {"prompt": [1, -1]}, "prompt"),
        ("completion", {"prompt": "a", "echo": True}, "echo"),
        ("completion", {"prompt": "a", "tools": []}, "tools"),
        ("completion", {"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
def test_refused(endpoint: Endpoint, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check(endpoint, body)
    assert caught.value.param == param
    unknown = param not in (ChatJob if endpoint == "chat" else CompletionJob).__struct_fields__
    assert caught.value.code == ("unknown_parameter" if unknown else "invalid_request")
    assert caught.value.message.startswith(f'unknown key "{param}"' if unknown else param)


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([*HELLO, {"role": "usr", "content": "x"}], "messages[1].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant"}], "messages[0]"),
        ([*HELLO, None], "messages[1]"),
        ([{"role": "user", "content": "x", "nmae": "me"}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].image_url.url",
        ),
        ([{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ],
)
def test_the_place_in_a_conversation_is_named(messages: list[Any], path: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check("chat", {"messages": messages})
    assert re.split(r":? ", caught.value.message)[0] == path


@pytest.mark.parametrize(
    ("value", "param"),
    [({"the": 1}, "logit_bias"), ({"7\n": 1}, "logit_bias"), ({"1": 101}, "logit_bias"), ({"1": True}, "logit_bias")],
)
def test_tokens_of_a_bias_are_numbers(value: Any, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check("chat", {"messages": HELLO, "logit_bias": value})
    assert caught.value.param == param


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), 1e308])
@pytest.mark.parametrize("key", ["temperature", "seed", "max_tokens", "timeout"])
def test_huge_numbers_are_refused(key: str, value: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        check("chat", {"messages": HELLO, key: value})
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("endpoint", "key", "hint"),
    [
        ("chat", "temprature", "'temperature'"),
        ("chat", "max_token", "'max_tokens'"),
        ("chat", "best_of", "/v1/completions"),
        ("completion", "messages", "/v1/chat/completions"),
        ("chat", "zzz", "unknown keys"),
    ],
)
def test_the_nearest_key_is_named(endpoint: Endpoint, key: str, hint: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check(endpoint, {"messages": HELLO, key: 1} if endpoint == "chat" else {key: 1})
    assert hint in (caught.value.hint or "")


def test_streams_where_they_can_be() -> None:
    values = check_request("chat", {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}})
    assert values["stream"] is True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(ChatJob.__struct_fields__)), JSON)
def test_any_value_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    try:
        call = check("chat", {"messages": HELLO, key: value})
    except RequestRefused as error:
        assert error.param == key
        assert key in error.message
    else:
        assert isinstance(call.request(), Request)
        assert stored_call("chat", {"messages": HELLO, key: value}) == call
