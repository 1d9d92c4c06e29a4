"""Bodies in: every key known by name, wrong ones named, nothing dropped silently."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Chat, Request, Sampling
from tokenmill.errors import RequestRefused
from tokenmill.jobs.body import Endpoint, check, stored_call
from tokenmill.jobs.openai_schema import CHAT, COMPLETION

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
    assert set(OPENAI_CHAT) <= set(CHAT)
    assert set(OPENAI_COMPLETION) <= set(COMPLETION)


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
    ("endpoint", "body", "words"),
    [
        ("chat", {}, "messages is missing"),
        ("completion", {}, "prompt is missing"),
        ("chat", {"messages": HELLO, "temperatur": 1}, 'unknown key "temperatur"'),
        ("chat", {"messages": HELLO, "temperature": "hot"}, 'temperature: must be a number from 0 to 100, not "hot"'),
        ("chat", {"messages": HELLO, "temperature": True}, "temperature: must be a number"),
        ("chat", {"messages": HELLO, "temperature": -0.1}, "temperature: must be a number from 0"),
        ("chat", {"messages": HELLO, "top_p": 1.1}, "top_p: must be a number from 0 to 1"),
        ("chat", {"messages": HELLO, "max_tokens": 0}, "max_tokens: must be a whole number from 1"),
        ("chat", {"messages": HELLO, "max_tokens": -1}, "max_tokens: must be a whole number from 1"),
        (
            "chat",
            {"messages": HELLO, "max_completion_tokens": -1},
            "max_completion_tokens: must be a whole number from 1",
        ),
        ("completion", {"prompt": "a", "max_tokens": -1}, "max_tokens: must be a whole number from 1"),
        ("chat", {"messages": HELLO, "n": -1}, "n: is -1"),
        ("chat", {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs: must be a whole number"),
        ("chat", {"messages": HELLO, "top_k": -2}, "top_k: must be a whole number"),
        ("chat", {"messages": HELLO, "seed": -(1 << 63) - 1}, "seed: must be a whole number"),
        ("chat", {"messages": HELLO, "max_tokens": 2.5}, "max_tokens: must be a whole number"),
        (
            "chat",
            {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3},
            "max_completion_tokens: is given twice",
        ),
        ("chat", {"messages": HELLO, "seed": 1 << 63}, "seed: must be a whole number"),
        ("chat", {"messages": HELLO, "n": 2}, "n: is 2, which cannot be answered: a line has one answer"),
        ("chat", {"messages": HELLO, "stream": True}, "stream: a job's answer comes whole"),
        ("chat", {"messages": HELLO, "stop": ["a", ""]}, "stop: must be"),
        ("chat", {"messages": HELLO, "stop": ["a"] * 65}, "stop: has 65 texts"),
        ("chat", {"messages": HELLO, "logit_bias": {"the": 1}}, 'logit_bias: "the" is not a token'),
        ("chat", {"messages": HELLO, "logit_bias": {"1": 101}}, "logit_bias: must be a number from -100"),
        ("chat", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs: must be a whole number"),
        ("chat", {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format: its type must be"),
        ("chat", {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format: json_schema needs"),
        ("chat", {"messages": HELLO, "grammar": "x", "json_schema": {}}, "grammar and a JSON format"),
        ("chat", {"messages": HELLO, "tool_choice": "required"}, "tool_choice asks for a tool"),
        (
            "chat",
            {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            'no tool is called "x"',
        ),
        ("chat", {"messages": HELLO, "tools": [{"type": "retrieval"}]}, "tools[0] must be"),
        ("chat", {"messages": HELLO, "functions": [{}]}, "functions: is OpenAI's older form"),
        ("chat", {"messages": HELLO, "audio": {"voice": "x"}}, "audio: cannot be answered"),
        ("chat", {"messages": HELLO, "modalities": ["audio"]}, 'modalities: is ["audio"], which'),
        ("chat", {"messages": []}, "messages: must be a list with at least one"),
        ("chat", {"messages": "hello"}, "messages: must be a list"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ("chat", {"messages": [*HELLO, {"role": "usr", "content": "x"}]}, "messages[1].role must be one of"),
        ("chat", {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role must be one of"),
        ("chat", {"messages": [{"role": "user", "content": "x", "nmae": "me"}]}, "messages[0] has the unknown key"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            'messages[0].content[0] is of type "image_url"; only text',
        ),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a text"),
        ("chat", {"messages": [{"role": "user", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id must"),
        ("chat", {"messages": ["hello"]}, "messages[0] must be an object"),
        ("chat", {"messages": [*HELLO, None]}, "messages[1] must be an object"),
        ("chat", {"messages": [{}]}, "messages[0].role must be one of"),
        ("chat", {"messages": [{"role": "", "content": "x"}]}, "messages[0].role must be one of"),
        ("chat", {"messages": [{"role": 7, "content": "x"}]}, "messages[0].role must be one of"),
        ("chat", {"messages": [{"role": "assistant"}]}, "messages[0] has no content"),
        ("chat", {"messages": [{"role": "tool", "tool_calls": [1]}]}, "messages[0] has no content"),
        ("chat", {"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages[0].content must be a text"),
        ("chat", {"messages": [{"role": "user", "content": []}]}, "messages[0].content has no parts"),
        ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] is of type null"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 'is of type "input_audio"'),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "text must be a text"),
        ("chat", {"messages": [{"role": "user", "content": "x", "name": 7}]}, "messages[0].name must be a text"),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": True}]},
            "messages[0].reasoning",
        ),
        ("chat", {"messages": [{"role": "assistant", "content": "", "tool_calls": "f"}]}, "tool_calls must be a list"),
        ("chat", {"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, "tools[0] must be"),
        ("chat", {"messages": HELLO, "tools": [TOOL], "tool_choice": "always"}, "tool_choice: must be"),
        ("completion", {"prompt": ["a", "b"]}, "prompt: holds 2 prompts"),
        ("completion", {"prompt": [1, -1]}, "prompt: must be"),
        ("completion", {"prompt": "a", "echo": True}, "echo: is true, which cannot be answered"),
        ("completion", {"prompt": "a", "tools": []}, 'unknown key "tools"'),
        ("completion", {"prompt": "a", "logprobs": True}, "logprobs: must be a whole number"),
    ],
)
def test_refused(endpoint: Endpoint, body: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check(endpoint, body)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("endpoint", "key", "hint"),
    [
        ("chat", "temprature", "'temperature'"),
        ("chat", "max_token", "'max_tokens'"),
        ("chat", "best_of", "/v1/completions"),
        ("completion", "messages", "/v1/chat/completions"),
        ("chat", "zzz", "nothing is ignored"),
    ],
)
def test_the_nearest_key_is_named(endpoint: Endpoint, key: str, hint: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check(endpoint, {"messages": HELLO, key: 1} if endpoint == "chat" else {key: 1})
    assert hint in (caught.value.hint or "")


def test_streams_where_they_can_be() -> None:
    call = check("chat", {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}, streams=True)
    assert call.values["stream"] is True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(CHAT)), JSON)
def test_any_value_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    try:
        call = check("chat", {"messages": HELLO, key: value})
    except RequestRefused as error:
        assert key in error.message
    else:
        assert isinstance(call.request(), Request)
        assert stored_call("chat", {"messages": HELLO, key: value}) == call
