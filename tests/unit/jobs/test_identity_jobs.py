"""Which jobs are the same, and which are neighbours."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.jobs.body import Endpoint, check
from tokenmill.jobs.identity import CHUNK_BYTES, MOST_CHUNKS, alone, head_key, head_of, place, prompt_text, shared_bytes

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
    ({"messages": [{"role": "user", "content": "a\n\nuser\nb"}]},
     {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}),
    ({"tools": [TOOL]}, {}),
    ({"tools": [TOOL]}, {"tools": [TURNED]}),  # a template writes them into the prompt in this order
    ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}),
    ({"chat_template_kwargs": {"enable_thinking": False}}, {}),
    ({"json_schema": {"a": 1, "b": 2}}, {"json_schema": {"b": 2, "a": 1}}),  # a grammar asks for keys in this order
    ({"response_format": {"type": "json_object"}}, {}),
    ({"logprobs": True}, {}),
    ({"tools": [TOOL], "parallel_tool_calls": False}, {"tools": [TOOL]}),
    ({"ignore_eos": True}, {}),
]  # fmt: skip


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
    min_size=1, max_size=3,
)  # fmt: skip


@given(MESSAGES, MESSAGES)
def test_only_equal_conversations_are_equal(one: list[Any], other: list[Any]) -> None:
    assert (identity({"messages": one}) == identity({"messages": other})) == (one == other)


# Places.


@given(st.text(max_size=3000), st.text(max_size=700), st.text(max_size=700))
def test_what_is_shared_is_shared(head: str, one: str, other: str) -> None:
    ours, theirs = head_key(head + one), head_key(head + other)
    chunks = len(head.encode()) // CHUNK_BYTES
    assert ours[: 4 * chunks] == theirs[: 4 * chunks]
    assert len(ours) % 4 == 0
    assert 4 <= len(ours) <= 4 * MOST_CHUNKS


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (0, 1),
        (1, 1),
        (CHUNK_BYTES, 1),
        (CHUNK_BYTES + 1, 2),
        (12 << 10, 24),
        ((12 << 10) + 1, 25),
        (64 << 10, 50),
        (272 << 10, 63),
        ((272 << 10) + 1, MOST_CHUNKS),
        (10**6, MOST_CHUNKS),
    ],
)
def test_length_of_a_key(length: int, chunks: int) -> None:
    assert len(head_key(b"x" * length)) == 4 * chunks


def test_texts_that_part_late_are_neighbours_but_not_equal() -> None:
    head = "x" * (272 << 10)
    one, other = head_key(head + "a"), head_key(head + "b")
    assert one[:-4] == other[:-4]
    assert one != other


def test_sorting_by_place_walks_the_forest() -> None:
    """In sorted order every shared head is one contiguous run, at each depth of whole chunks."""

    def text(*parts: int) -> str:
        return "".join(chr(65 + part) * CHUNK_BYTES for part in parts)

    texts = [text(a, b, c) for a in range(4) for b in range(3) for c in range(3)]
    texts.sort(key=lambda item: hash((item, "shuffle")))
    ordered = sorted(texts, key=head_key)
    for depth in (1, 2):
        heads = [item[: depth * CHUNK_BYTES] for item in ordered]
        runs = 1 + sum(one != other for one, other in pairwise(heads))
        assert runs == len(set(heads))


def test_shared_bytes_of_two_places() -> None:
    system = {"role": "system", "content": "s" * 3 * CHUNK_BYTES}
    one, other = (place("m", check("chat", {"messages": [system, {"role": "user", "content": text}]}))
                  for text in ("a" * 900, "b" * 900))  # fmt: skip
    assert shared_bytes(one.place, other.place) == 3 * CHUNK_BYTES
    assert head_of(one.place) == head_key(
        prompt_text(check("chat", {"messages": [system, {"role": "user", "content": "a" * 900}]}))
    )
    assert shared_bytes(one.place, one.place) <= one.prompt_bytes + CHUNK_BYTES


def test_equal_prompts_with_other_values_are_neighbours_and_apart() -> None:
    places = [place("m", check("chat", {"messages": HELLO, "seed": seed})).place for seed in range(50)]
    assert len({head_of(item) for item in places}) == 1
    assert len(set(places)) == 50


def test_tools_come_first_in_the_prompt() -> None:
    text = prompt_text(check("chat", {"messages": HELLO, "tools": [TOOL]}))
    assert text.index('"look"') < text.index("hello")
    assert json.dumps(TOOL, separators=(",", ":")) in text


def test_prompts_of_tokens_have_places() -> None:
    one, other = (place("m", check("completion", {"prompt": [*range(256), *tail]})) for tail in ((1, 2), (3, 4)))
    assert shared_bytes(one.place, other.place) == 1024
    assert prompt_text(check("completion", {"prompt": [1, 2]})) == "1 2"
