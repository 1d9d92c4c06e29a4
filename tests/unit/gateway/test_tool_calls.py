"""Tool calls in a model's words: found in every known form, however the text is cut; text stays text."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_engine import CAPABILITIES
from tokenmill.engine.engine import Answer, Chat, Request, Sampling, Usage
from tokenmill.errors import RequestRefused
from tokenmill.gateway.tool_calls import Call, Reader, fitted, parsed

NAMES = frozenset(("weather", "time"))
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"town": "Rome"}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
CASES = [
    (HERMES, "", ["weather"]),
    (f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.\n", ["weather", "weather"]),
    ('<tool_call>{"name": "other", "arguments": "{}"}', "", ["other"]),
    (KIMI, "", ["weather", "time"]),
    (f"I look. {KIMI}", "I look. ", ["weather", "time"]),
    ('{"name": "weather", "parameters": {"town": "Rome"}}', "", ["weather"]),
    ('{"type": "function", "function": {"name": "time", "arguments": {}}}', "", ["time"]),
    (
        '{"type": "function", "name": "time", "parameters": {}}; {"name": "weather", "parameters": {}}',
        "",
        ["time", "weather"],
    ),
    ('<|python_tag|>{"name": "time", "parameters": {}}', "", ["time"]),
]
TEXTS = [
    "",
    "  ",
    "Just words with a < and a <tool and {braces}.",
    '{"name": "stranger", "parameters": {}}',
    '{"answer": 42}',
    '{"name": "weather", "parameters": {}} and more words',
    '{"name": "weather"',
    "<tool_call>not json</tool_call> after",
    "<tool_call>not finished",
    "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>",
    "<|python_tag|>print(1)",
    '["name"]',
    "{",
]


def read(parts: list[str], *, several: bool = True) -> tuple[str, list[Call]]:
    reader = Reader(NAMES, several=several)
    out = [item for part in parts for item in reader.feed(part)] + reader.end()
    return "".join(item for item in out if isinstance(item, str)), [item for item in out if isinstance(item, Call)]


@pytest.mark.parametrize(("text", "said", "names"), CASES)
@given(data=st.data())
def test_calls_are_found_however_they_are_cut(text: str, said: str, names: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    got, calls = read(parts)
    assert got == said
    assert [call.name for call in calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
def test_text_stays_text(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parts) == (text, [])


def test_words_are_not_held_back() -> None:
    reader = Reader(NAMES)
    assert reader.feed("Hello <") == ["Hello "]
    assert reader.feed("b>") == ["<b>"]
    assert Reader(NAMES).feed('{"answer": ') == ['{"answer": ']


def test_one_call_only() -> None:
    assert [call.name for call in read([KIMI], several=False)[1]] == ["weather"]


def test_kimis_ids_come_back() -> None:
    assert [call.id for call in read([KIMI])[1]] == ["functions.weather:0", "functions.time:1"]
    assert read([HERMES])[1][0].id.startswith("call_")


def test_an_answer() -> None:
    answer = parsed(Answer(f"So: {HERMES}", "stop", Usage(1, 1, 0)), NAMES)
    assert answer.finish_reason == "tool_calls"
    assert answer.message is not None
    assert answer.message["content"] == "So:"
    assert answer.message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"town": "Rome"}'}
    plain = Answer("No.", "stop", Usage(1, 1, 0))
    assert parsed(plain, NAMES) is plain


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "time"}}
CAN = replace(CAPABILITIES, json_schema=True)


def request(choice: object, json_schema: str | None = None) -> Request:
    prompt = Chat(({"role": "user", "content": "?"},), (TOOL, OTHER), choice)
    return Request(prompt, Sampling(json_schema=json_schema), extra={"parallel_tool_calls": False})


def test_what_was_chosen_is_held() -> None:
    none = fitted(request("none"), CAN)
    assert isinstance(none.prompt, Chat)
    assert none.prompt.tools == ()
    assert fitted(request(None), CAN).sampling.json_schema is None
    any_of = json.loads(fitted(request("required"), CAN).sampling.json_schema or "")
    assert [one["properties"]["name"]["const"] for one in any_of["anyOf"]] == ["weather", "time"]
    named = json.loads(
        fitted(request({"type": "function", "function": {"name": "time"}}), CAN).sampling.json_schema or ""
    )
    assert named["properties"]["name"] == {"const": "time"}
    assert fitted(request("required"), CAN).extra == {}


def test_who_parses_calls_gets_the_request_as_it_is() -> None:
    given_ = request("required")
    assert fitted(given_, replace(CAN, tools_parsed=True)) is given_
    plain = Request("text")
    assert fitted(plain, CAN) is plain


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(RequestRefused, match="exclude each other"):
        fitted(request("required", json_schema="{}"), CAN)
    with pytest.raises(RequestRefused, match="cannot be held to a call"):
        fitted(request("required"), CAPABILITIES)
