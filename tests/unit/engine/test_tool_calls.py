"""Tool calls in generated text: parsed in every known format, however the stream is split; other text is unchanged."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_engine import CAPABILITIES
from tokenmill.engine.engine import Answer, Capabilities, Chat, FinishReason, Request, Sampling, Usage
from tokenmill.engine.output_parser import ToolCallParser
from tokenmill.engine.tool_calls import ToolUse, adapt
from tokenmill.engine.tool_formats import ToolCall
from tokenmill.errors import RequestRefused

NAMES: dict[str, dict[str, Any]] = {"weather": {}, "time": {}}
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


def read(parts: list[str], *, parallel: bool = True) -> tuple[str, list[ToolCall]]:
    reader = ToolCallParser(NAMES, parallel=parallel)
    out = [item for part in parts for item in reader.feed(part)] + reader.end()
    return "".join(item for item in out if isinstance(item, str)), [item for item in out if isinstance(item, ToolCall)]


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
    reader = ToolCallParser(NAMES)
    assert reader.feed("Hello <") == ["Hello "]
    assert reader.feed("b>") == ["<b>"]
    assert ToolCallParser(NAMES).feed('{"answer": ') == ['{"answer": ']


def test_one_call_only() -> None:
    assert [call.name for call in read([KIMI], parallel=False)[1]] == ["weather"]


def test_kimis_ids_come_back() -> None:
    assert [call.id for call in read([KIMI])[1]] == ["functions.weather:0", "functions.time:1"]
    assert read([HERMES])[1][0].id.startswith("call_")


def parsed(text: str, finish_reason: FinishReason = "stop") -> Answer:
    return ToolUse(Request("?"), NAMES, parses=True).parse(Answer(text, finish_reason, Usage(1, 1, 0)))


def test_calls_move_from_the_text_to_the_message() -> None:
    answer = parsed(f"So: {HERMES}")
    assert answer.finish_reason == "tool_calls"
    assert answer.message is not None
    assert answer.message["content"] == "So:"
    assert answer.message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"town": "Rome"}'}
    assert parsed("No.").message is None
    assert parsed("No.").finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (HERMES, "tool_calls"),  # cut off exactly behind the call
        (f'{HERMES}<tool_call>{{"name": "ti', "length"),
        (f"{HERMES} And then", "length"),
        ('{"name": "weather", "arguments": {"town": "Ro', "length"),
    ],
)
def test_an_answer_cut_off_after_its_last_call_says_so(text: str, reason: str) -> None:
    assert parsed(text, "length").finish_reason == reason


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "time"}}
CAN = replace(CAPABILITIES, json_schema=True)
NAMED = {"type": "function", "function": {"name": "time"}}


def request(
    choice: object, json_schema: str | None = None, tools: tuple[dict[str, Any], ...] = (TOOL, OTHER)
) -> Request:
    prompt = Chat(({"role": "user", "content": "?"},), tools, choice)
    return Request(prompt, Sampling(json_schema=json_schema), extra={"parallel_tool_calls": False})


def schema_of(choice: object, tools: tuple[dict[str, Any], ...] = (TOOL, OTHER)) -> Any:
    return json.loads(adapt(request(choice, tools=tools), CAN).request.sampling.json_schema or "null")


def test_none_leaves_the_tools_out() -> None:
    use = adapt(request("none"), replace(CAN, shows_tools=False))
    assert isinstance(use.request.prompt, Chat)
    assert use.request.prompt.tools == ()
    assert use.tools is None
    assert not use.hidden


def test_auto_is_not_constrained_and_is_parsed() -> None:
    use = adapt(request(None), CAN)
    assert use.request.sampling.json_schema is None
    assert (use.tools, use.forced, use.parallel) == (NAMES, False, False)
    assert use.request.extra == {}


def test_a_forced_call_becomes_a_schema() -> None:
    required = schema_of("required")["anyOf"]
    assert [one["properties"]["name"]["const"] for one in required] == ["weather", "time"]
    named = schema_of(NAMED)
    assert named["properties"]["name"] == {"const": "time"}
    assert named["properties"]["arguments"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert adapt(request("required"), CAN).forced


def test_references_inside_parameters_lead_to_the_same_schema() -> None:
    place = {"type": "object", "properties": {"town": {"type": "string"}, "next": {"$ref": "#/$defs/Place"}}}
    parameters = {
        "properties": {"default": {"$ref": "#/$defs/Place"}, "unit": {"const": {"$ref": "#/kept"}}},
        "$defs": {"Place": place},
    }
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    for schema, path in (
        (schema_of("required", (OTHER, tool)), "#/anyOf/1/properties/arguments/$defs/Place"),
        (schema_of("required", (tool,)), "#/properties/arguments/$defs/Place"),
    ):
        target = schema
        for key in path.split("/")[1:]:
            target = target[int(key) if isinstance(target, list) else key]
        assert target["properties"] == {"town": {"type": "string"}, "next": {"$ref": path}}
        call = schema["anyOf"][1] if "anyOf" in schema else schema
        arguments = call["properties"]["arguments"]
        assert arguments["type"] == "object"
        assert arguments["properties"]["default"] == {"$ref": path}
        assert arguments["properties"]["unit"] == {"const": {"$ref": "#/kept"}}


def test_an_engine_that_parses_calls_gets_the_request_unchanged() -> None:
    given_ = request("required")
    use = adapt(given_, replace(CAN, tools_parsed=True))
    assert use.request is given_
    assert use.tools is None
    plain = Request("text")
    assert adapt(plain, CAN).request is plain


def test_tools_that_the_model_does_not_see_are_marked() -> None:
    assert adapt(request(None), replace(CAN, shows_tools=False)).hidden
    assert adapt(request("required"), replace(CAN, shows_tools=False)).hidden
    assert not adapt(request(None), replace(CAN, shows_tools=True)).hidden
    assert not adapt(request(None), replace(CAN, shows_tools=None)).hidden


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("refused", "capabilities"),
    [
        (request("required", json_schema="{}"), CAN),
        (request(NAMED, json_schema="{}"), CAN),
        (request("required"), CAPABILITIES),
        (request("required", tools=({"function": {"name": "f", "parameters": {"type": "string"}}},)), CAN),
        (request("required", tools=({"function": {"name": "f", "parameters": [1]}},)), CAN),
        (request("required", tools=({"function": {"name": "f", "parameters": nested(5000)}},)), CAN),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(refused: Request, capabilities: Capabilities) -> None:
    with pytest.raises(RequestRefused) as error:
        adapt(refused, capabilities)
    assert error.value.message.startswith(("tool_choice: ", "tools: "))
    assert error.value.hint
