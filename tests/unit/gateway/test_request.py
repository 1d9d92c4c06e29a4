"""HTTP-only features of bodies: choices, prompts, streams, priorities; and limits of the parser."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import RequestRefused
from tokenmill.gateway.http.faults import GatewayFault, param_of
from tokenmill.gateway.http.request import (
    MAX_DEPTH,
    ParsedRequest,
    deeper_than,
    parse_json,
    parsed_request,
    priority_of,
)

JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@given(JSON.filter(lambda value: isinstance(value, dict | list)), st.integers(1, 6))
def test_depth(value: Any, most: int) -> None:
    assert deeper_than(value, most) == (depth(value) > most)


def test_bounds_of_json() -> None:
    assert parse_json(b' {"a": 1} \n') == {"a": 1}
    assert parse_json(b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH)
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    for bad in (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), b'{"a": 1} x', b'{"a": Infinity}'):
        with pytest.raises(GatewayFault):
            parse_json(bad)


def chat(**more: Any) -> ParsedRequest:
    return parsed_request(
        "chat", {"messages": [{"role": "user", "content": "?"}], **more}, "interactive", max_choices=8
    )


def test_choices_have_seeds_of_their_own() -> None:
    requests = chat(n=3, seed=7).engine_requests()
    assert [request.sampling.seed for request in requests] == [7, 8, 9]
    assert {request.prompt for request in requests if isinstance(request.prompt, str)} == set()
    assert [request.sampling.seed for request in chat(n=2).engine_requests()] == [None, None]
    highest = (1 << 63) - 1
    assert [request.sampling.seed for request in chat(n=2, seed=highest).engine_requests()] == [highest, highest - 1]


def test_several_prompts_of_a_completion() -> None:
    made = parsed_request("completion", {"prompt": ["a", [1, 2]], "n": 2, "seed": 1}, "batch", max_choices=8)
    assert [request.prompt for request in made.engine_requests()] == ["a", "a", (1, 2), (1, 2)]
    assert [request.sampling.seed for request in made.engine_requests()] == [1, 2, 1, 2]
    assert all(request.priority == "batch" for request in made.engine_requests())
    one = parsed_request("completion", {"prompt": [1, 2]}, "batch", max_choices=8)
    assert [request.prompt for request in one.engine_requests()] == [(1, 2)]


def test_streams() -> None:
    made = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert (made.stream, made.include_usage) == (True, True)
    assert chat(stream=False, stream_options=None).stream is False


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 9}, "n"),
        ({"n": 1.5}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"deadline": 1}, "deadline"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"nonsense": 1}, "nonsense"),
        ({"messages": []}, "messages"),
    ],
)
def test_errors_name_the_key(more: dict[str, Any], param: str) -> None:
    with pytest.raises((GatewayFault, RequestRefused)) as caught:
        chat(**more)
    assert param_of(caught.value) == param


def test_what_clients_always_send_is_taken() -> None:
    assert chat(
        user="u", metadata={"a": "b"}, store=True, service_tier="auto", parallel_tool_calls=True, safety_identifier="x"
    )


@pytest.mark.parametrize(
    ("headers", "body", "priority"),
    [
        ({}, {}, "interactive"),
        ({}, {"service_tier": "flex"}, "batch"),
        ({}, {"service_tier": "priority"}, "interactive"),
        ({"x-tokenmill-priority": "batch"}, {}, "batch"),
        ({"x-tokenmill-priority": "interactive"}, {"service_tier": "flex"}, "interactive"),
        ({"x-tokenmill-lane": "batch"}, {}, "batch"),
        ({"x-tokenmill-lane": "interactive"}, {"service_tier": "flex"}, "interactive"),
    ],
)
def test_priority_class(headers: dict[str, str], body: dict[str, Any], priority: str) -> None:
    assert priority_of(headers, body) == priority
