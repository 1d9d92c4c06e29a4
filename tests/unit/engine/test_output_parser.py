"""Outputs of the model families: reasoning, text and calls, however the text is cut into pieces.

The calls have the formats of ai-dynamo/dynamo, tests/parity/parser/regenerate_fixtures.py (Kimi K2, Qwen3-Coder, GLM,
DeepSeek V3.1, harmony), of llama.cpp's parsers (Kimi K3, MiniMax M3, Ling-3) and of the models' chat templates (all
others), with one question and one city for all.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Answer, Usage
from tokenmill.engine.engine import Request as EngineRequest
from tokenmill.engine.output_parser import OutputParser, ReasoningPart, ToolCallParser
from tokenmill.engine.reasoning import opened_by
from tokenmill.engine.tool_calls import ToolUse
from tokenmill.engine.tool_formats import ToolCall

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"location": {"type": "string"}, "days": {"type": "integer"}, "flags": {"type": "array"}}
}
ARGUMENTS = {"location": "NYC", "days": 3, "flags": ["wind", "rain"]}
JSON = json.dumps(ARGUMENTS)
CALL = '{"name": "get_weather", "arguments": ' + JSON + "}"
LIST = '["wind", "rain"]'
FORMATS = {
    "qwen3, ling-1t": f"<tool_call>\n{CALL}\n</tool_call>",
    "qwen3-coder, qwen3.5, nemotron-3": (
        "<tool_call>\n<function=get_weather>\n<parameter=location>\nNYC\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        f"<parameter=flags>\n{LIST}\n</parameter>\n</function>\n</tool_call>"
    ),
    "qwen3-coder without its outer tag": (
        "<function=get_weather>\n<parameter=location>\nNYC\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        f"<parameter=flags>\n{LIST}\n</parameter>\n</function>"
    ),
    "glm-4.5, glm-4.7, ling-3": (
        "<tool_call>get_weather\n<arg_key>location</arg_key>\n<arg_value>NYC</arg_value>\n<arg_key>days</arg_key>\n"
        f"<arg_value>3</arg_value><arg_key>flags</arg_key><arg_value>{LIST}</arg_value>\n</tool_call>"
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi-k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="location" type="string"<|sep|>NYC<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        f'<|open|>argument key="flags" type="array"<|sep|>{LIST}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "deepseek-r1, deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="location" string="true">NYC</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="flags" string="false">{LIST}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "deepseek-v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="location" string="true">NYC</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="flags" string="false">{LIST}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="location">NYC</parameter>\n'
        f'<parameter name="days">3</parameter>\n<parameter name="flags">{LIST}</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "minimax-m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<location>NYC]<]minimax[>[</location>'
        f"]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[<flags>{LIST}]<]minimax[>[</flags>"
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "hunyuan": f"<tool_calls>[{CALL}]</tool_calls>",
    "nemotron-h, nemotron nano 2": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "mistral, list": f"[TOOL_CALLS][{CALL}]",
    "mistral large 3": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    "mistral small 3.2": f"[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{JSON}",
    "llama-4": f'<|python_start|>[get_weather(location="NYC", days=3, flags={LIST})]<|python_end|>',
    "llama-4 without marks": f'[get_weather(location="NYC", days=3, flags={LIST})]',
    "llama-3.1": '<|python_tag|>{"name": "get_weather", "parameters": ' + JSON + "}",
    "gpt-oss": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>",
}
THOUGHT = "The user asks for NYC.\nI call a tool < not a tag."
REASONED = {
    "deepseek, qwen, glm, kimi-k2, minimax-m2, ling, nemotron": ("<think>", "</think>\n\n"),
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "kimi-k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}


def read(pieces: list[str], *, tools: bool = True) -> tuple[str, str, list[ToolCall]]:
    """Reasoning, text and calls."""
    parser = OutputParser(ToolCallParser(TOOLS) if tools else None)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    return (
        "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
        "".join(part for part in parts if isinstance(part, str)),
        [part for part in parts if isinstance(part, ToolCall)],
    )


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def parsed(text: str, *, tools: bool = True) -> Answer:
    use = ToolUse(EngineRequest("?"), TOOLS if tools else None, parses=True)
    return use.parse(Answer(text, "stop", Usage(1, 1, 0)))


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
@given(data=st.data())
def test_a_call_is_found_in_the_format_of_every_family(text: str, data: st.DataObject) -> None:
    reasoning, said, (call,) = read(cut(text, data))
    assert (reasoning, said) == ("", "")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)


@pytest.mark.parametrize("tags", REASONED.values(), ids=REASONED)
@given(data=st.data())
def test_reasoning_is_separated_from_the_text(tags: tuple[str, str], data: st.DataObject) -> None:
    text = f"{tags[0]}{THOUGHT}{tags[1]}It is windy."
    assert read(cut(text, data), tools=False) == (THOUGHT, "It is windy.", [])


@pytest.mark.parametrize("text", [text for name, text in FORMATS.items() if name not in ("gpt-oss", "kimi-k3")])
@given(data=st.data())
def test_a_call_follows_the_reasoning(text: str, data: st.DataObject) -> None:
    reasoning, _, (call,) = read(cut(f"<think>{THOUGHT}</think>\n\n{text}", data))
    assert reasoning == THOUGHT
    assert json.loads(call.arguments) == ARGUMENTS


@given(data=st.data())
def test_channels_and_sections_have_reasoning_text_and_calls(data: st.DataObject) -> None:
    oss = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant{FORMATS['gpt-oss']}"
    reasoning, said, (call,) = read(cut(oss, data))
    assert (reasoning, said, json.loads(call.arguments)) == (THOUGHT, "", ARGUMENTS)
    k3 = f"{THOUGHT.join(('<|open|>think<|sep|>', '<|close|>think<|sep|>'))}<|open|>response<|sep|>So:<|close|>response<|sep|>"
    reasoning, said, (call,) = read(cut(f"{k3}{FORMATS['kimi-k3']}<|close|>message<|sep|>", data))
    assert (reasoning, said, json.loads(call.arguments)) == (THOUGHT, "So:", ARGUMENTS)


@given(st.text(alphabet="ab <>|{}[]\n/think", max_size=30), st.data())
def test_text_without_tags_is_unchanged(text: str, data: st.DataObject) -> None:
    if not text.lstrip().startswith("<think>"):
        assert read(cut(text, data), tools=False) == ("", text, [])


def test_the_message_has_reasoning_content_and_text() -> None:
    answer = parsed("<think>\nHm.\n</think>\n\nYes.", tools=False)
    assert answer.message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    silent = parsed("<think>\n\n</think>\n\nYes.", tools=False)
    assert silent.message == {"role": "assistant", "content": "Yes."}
    called = parsed(f"<think>Hm.</think>{FORMATS['glm-4.5, glm-4.7, ling-3']}")
    assert called.message is not None
    assert (called.message["content"], called.message["reasoning_content"]) == (None, "Hm.")
    assert called.finish_reason == "tool_calls"
    assert parsed("Yes.").message is None


def test_reasoning_that_is_cut_off_is_not_the_answer() -> None:
    answer = parsed("<think>Hm. If", tools=False)
    assert answer.message == {"role": "assistant", "content": "", "reasoning_content": "Hm. If"}


def test_a_prompt_tells_which_tag_it_opened() -> None:
    assert opened_by("<|im_start|>assistant\n<think>\n") == "<think>"
    assert opened_by('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>') == "<|open|>think<|sep|>"
    assert opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n") == ""
    assert opened_by("") == ""
