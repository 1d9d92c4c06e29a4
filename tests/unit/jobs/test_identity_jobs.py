"""Which jobs are the same, and which are neighbours."""

import json
from bisect import bisect_right
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.prefix_keys import old_place
from tokenmill.jobs.ingest.identity import (
    CHUNK_BYTES,
    ENDS,
    FINE_BYTES,
    MAX_CHUNKS,
    alone,
    place,
    prefix_key_of,
    prompt_text,
    shared_bytes,
    stored_prefix_key,
)
from tokenmill.jobs.openai.call import Endpoint, check

HELLO = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"a": 1, "b": 2}}}
TURNED: dict[str, Any] = {"function": {"parameters": {"b": 2, "a": 1}, "name": "look"}, "type": "function"}


def identity(body: dict[str, Any], *, model: str = "m", endpoint: Endpoint = "chat") -> bytes:
    return place(model, check(endpoint, body)).identity


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1}, {"temperature": 1.0}),
    ({"top_p": 1, "seed": 5}, {"seed": 5.0, "top_p": 1.0}),
    ({"max_tokens": 9}, {"max_completion_tokens": 9}),
    ({"stop": "x"}, {"stop": ["x"]}),
    ({}, {"n": 1, "stream": False, "stop": [], "tools": [], "logit_bias": {}, "tool_choice": "auto", "seed": None}),
    ({}, {"user": "u", "metadata": {"a": "b"}, "timeout": 5, "priority": 3, "deadline": 5, "model": "gpt"}),
    ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}),
    ({"logit_bias": {"1": 2, "3": 4}}, {"logit_bias": {"3": 4, "1": 2.0}}),
    ({"messages": [{"content": "hello", "role": "user"}]}, {}),
    ({"messages": [{"content": "hello", "role": "user", "name": None}]}, {}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}, {"json_schema": {"a": 1}}),
]
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 0}),
    ({}, {"presence_penalty": 0}),  # engines have different defaults
    ({"temperature": 0}, {"temperature": 0.1}),
    ({"seed": 1}, {"seed": 2}),
    ({"seed": 1}, {}),
    ({"stop": ["a", "b"]}, {"stop": ["b", "a"]}),
    ({"stop": ["a", "b"]}, {"stop": ["ab"]}),
    ({"messages": [{"role": "user", "content": "hello "}]}, {}),
    ({"messages": [{"role": "system", "content": "hello"}]}, {}),
    ({"messages": [{"role": "user", "content": "e\u0301"}]}, {"messages": [{"role": "user", "content": "\u00e9"}]}),
    ({"messages": [{"role": "user", "content": "hello", "name": "me"}]}, {}),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}, {}),
    ({"messages": [*HELLO, *HELLO]}, {}),
    (
        {"messages": [{"role": "user", "content": "a\n\nuser\nb"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    ),
    ({"tools": [TOOL]}, {}),
    ({"tools": [TOOL]}, {"tools": [TURNED]}),  # a template writes them into the prompt in this order
    ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}),
    ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "required"}),
    (
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    ),
    ({"chat_template_kwargs": {"enable_thinking": False}}, {}),
    ({"json_schema": {"a": 1, "b": 2}}, {"json_schema": {"b": 2, "a": 1}}),  # a grammar asks for keys in this order
    ({"response_format": {"type": "json_object"}}, {}),
    ({"logprobs": True}, {}),
    ({"tools": [TOOL], "parallel_tool_calls": False}, {"tools": [TOOL]}),
    ({"ignore_eos": True}, {}),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identity({"messages": HELLO} | one) == identity({"messages": HELLO} | other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identity({"messages": HELLO} | one) != identity({"messages": HELLO} | other)


def test_model_and_endpoint_count() -> None:
    assert identity({"messages": HELLO}) != identity({"messages": HELLO}, model="n")
    text, tokens = {"prompt": "hello"}, {"prompt": [104, 101]}
    assert identity(text, endpoint="completion") != identity(tokens, endpoint="completion")
    assert identity(text, endpoint="completion") != identity({"messages": HELLO})


def test_the_canonical_form_is_what_it_was() -> None:
    # Stores on disks hold these: a change here makes every stored answer unfindable, and needs a new form.
    found = identity({"messages": HELLO, "temperature": 0, "max_tokens": 5})
    assert found.hex() == "e90699f4d48d2b33273ede05d183235e1e091690b558f0c471ca485f9754ff84"


def test_alone_is_alone() -> None:
    one = identity({"messages": HELLO})
    assert len({one, alone(one, 1), alone(one, 2)}) == 3
    assert alone(one, 1) == alone(one, 1)


@given(st.permutations(["temperature", "seed", "max_tokens", "messages", "stop"]))
def test_key_order_does_not_matter(order: list[str]) -> None:
    body: dict[str, Any] = {"temperature": 1, "seed": 2, "max_tokens": 3, "messages": HELLO, "stop": "x"}
    assert identity({key: body[key] for key in order}) == identity(body)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.text(alphabet='a\n"u,', max_size=6)},
        optional={"name": st.text(alphabet='a\n"', max_size=3)},
    ),
    min_size=1,
    max_size=3,
)


@given(MESSAGES, MESSAGES)
def test_only_equal_conversations_are_equal(one: list[Any], other: list[Any]) -> None:
    assert (identity({"messages": one}) == identity({"messages": other})) == (one == other)


# Places.


@given(st.text(max_size=3000), st.text(max_size=700), st.text(max_size=700))
def test_what_is_shared_is_shared(head: str, one: str, other: str) -> None:
    ours, theirs = prefix_key_of(head + one), prefix_key_of(head + other)
    chunks = bisect_right(ENDS, len(head.encode())) - 1
    assert ours[: 4 * chunks] == theirs[: 4 * chunks]
    assert len(ours) % 4 == 0
    assert 4 <= len(ours) <= 4 * MAX_CHUNKS


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (0, 1),
        (1, 1),
        (FINE_BYTES, 1),
        (FINE_BYTES + 1, 2),
        (CHUNK_BYTES, 6),
        (CHUNK_BYTES + 1, 7),
        (12 << 10, 29),
        ((12 << 10) + 1, 30),
        (64 << 10, 55),
        (272 << 10, 68),
        ((272 << 10) + 1, MAX_CHUNKS),
        (10**6, MAX_CHUNKS),
    ],
)
def test_length_of_a_key(length: int, chunks: int) -> None:
    assert len(prefix_key_of(b"x" * length)) == 4 * chunks


def test_texts_that_part_late_are_neighbours_but_not_equal() -> None:
    head = "x" * (272 << 10)
    one, other = prefix_key_of(head + "a"), prefix_key_of(head + "b")
    assert one[:-4] == other[:-4]
    assert one != other


@pytest.mark.parametrize("chunk_bytes", [FINE_BYTES, 2 * FINE_BYTES, CHUNK_BYTES, 8 * CHUNK_BYTES])
def test_sorting_by_place_walks_the_forest(chunk_bytes: int) -> None:
    """In sorted order every shared head is one contiguous run, at each depth of whole chunks."""

    def text(*parts: int) -> str:
        return "".join(chr(65 + part) * chunk_bytes for part in parts)

    texts = [text(a, b, c) for a in range(4) for b in range(3) for c in range(3)]
    texts.sort(key=lambda item: hash((item, "shuffle")))
    ordered = sorted(texts, key=prefix_key_of)
    for depth in (1, 2):
        heads = [item[: depth * chunk_bytes] for item in ordered]
        runs = 1 + sum(one != other for one, other in pairwise(heads))
        assert runs == len(set(heads))


def test_shared_bytes_of_two_places() -> None:
    system = {"role": "system", "content": "s" * 3 * CHUNK_BYTES}
    one, other = (
        place("m", check("chat", {"messages": [system, {"role": "user", "content": text}]}))
        for text in ("a" * 900, "b" * 900)
    )
    assert shared_bytes(one.place, other.place) == 3 * CHUNK_BYTES
    assert stored_prefix_key(one.place) == prefix_key_of(
        prompt_text(check("chat", {"messages": [system, {"role": "user", "content": "a" * 900}]}))
    )
    assert shared_bytes(one.place, one.place) <= one.prompt_bytes + CHUNK_BYTES


LENGTHS = st.sampled_from([0, 10, 64, 65, 300, 511, 512, 513, 1500, 12 << 10, 13 << 10, 65 << 10, 300 << 10])


@settings(max_examples=40)
@given(LENGTHS, LENGTHS, LENGTHS)
def test_places_of_an_older_form_share_what_they_did(head: int, one: int, other: int) -> None:
    """In whole chunks of 512 bytes, and never too much; the order among them stays that of the store."""
    texts = [b"h" * head + b"a" * one + b"!", b"h" * head + b"b" * other + b"?"]
    places = [old_place(text) for text in texts]
    found = shared_bytes(*places)
    assert found == min(head, 12 << 10) // 512 * 512 if head < 12 << 10 else 12 << 10 <= found <= head
    heads = [stored_prefix_key(item) for item in places]
    assert all(len(item) % 4 == 0 and len(item) <= 4 * MAX_CHUNKS for item in heads)
    assert sorted(heads) == [stored_prefix_key(item) for item in sorted(places)]
    assert sorted(heads)[0] <= sorted(heads)[1]


def test_places_of_both_forms_lie_apart() -> None:
    """Nothing is taken to be shared between them; the last word on that has the text."""
    texts = [b"h" * 5000 + bytes([65 + number]) * 900 for number in range(4)]
    new = [prefix_key_of(text) + b"iii" for text in texts]
    old = [old_place(text) for text in texts]
    assert {shared_bytes(one, other) for one in new for other in old} == {0}
    assert {shared_bytes(*pair) for pair in pairwise(new)} == {shared_bytes(*pair) for pair in pairwise(old)} == {4608}
    ordered = sorted([*new, *old])
    assert ordered in ([*sorted(new), *sorted(old)], [*sorted(old), *sorted(new)])


def test_equal_prompts_with_other_values_are_neighbours_and_apart() -> None:
    places = [place("m", check("chat", {"messages": HELLO, "seed": seed})).place for seed in range(50)]
    assert len({stored_prefix_key(item) for item in places}) == 1
    assert len(set(places)) == 50


def test_tools_come_first_in_the_prompt() -> None:
    text = prompt_text(check("chat", {"messages": HELLO, "tools": [TOOL]}))
    assert text.index('"look"') < text.index("hello")
    assert json.dumps(TOOL, separators=(",", ":")) in text


def test_prompts_of_tokens_have_places() -> None:
    one, other = (place("m", check("completion", {"prompt": [*range(256), *tail]})) for tail in ((1, 2), (3, 4)))
    assert shared_bytes(one.place, other.place) == 1024
    assert prompt_text(check("completion", {"prompt": [1, 2]})) == "1 2"
