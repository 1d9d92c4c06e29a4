"""Special tokens in message contents stay text, for every template family of the catalogue."""

import json
import re
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Chat
from tokenmill.errors import RequestRefused
from tokenmill.native.chat.special_tokens import RenderedPrompt
from tokenmill.native.chat.template import CHATML, ChatTemplate, SpecialTokens

DATA = Path(__file__).parents[3] / "data" / "templates"
_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_HARMONY = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
    "<|endoftext|>",
)
_KIMI = (
    "[BOS]",
    "[EOS]",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_LLAMA_3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_LLAMA_4 = (
    "<|begin_of_text|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eot|>",
    "<|eom|>",
    "<|python_start|>",
    "<|python_end|>",
)
# The template and the control tokens of each family of the catalogue; the first two are BOS and EOS.
FAMILIES = {
    "deepseek-v3": ("deepseek-v3.1", _DEEPSEEK),
    "deepseek-v3.2": ("deepseek-v3.2", _DEEPSEEK),
    "glm-4.5": ("glm-4.6", _GLM),
    "gpt-oss": ("gpt-oss", _HARMONY),
    "kimi-k2": ("kimi-k2-thinking", _KIMI),
    "llama-3.3-70b": ("llama-3.1", _LLAMA_3),
    "llama-4": ("llama-4", _LLAMA_4),
    "qwen3-dense": ("qwen3", _CHATML),
    "qwen3-moe": ("qwen3", _CHATML),
}
# Families whose published template is not in tests/data/templates.
NOT_CAPTURED = {
    "deepseek-v4",
    "ernie-4.5",
    "glm-5",
    "hunyuan-a13b",
    "kimi-k3",
    "ling-2",
    "ling-3",
    "minimax-m2",
    "minimax-m3",
    "mistral-large-3",
    "nemotron-3",
    "qwen3-next",
    "qwen3.5-moe",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "DESCRIPTION",
        "parameters": {"type": "object", "properties": {"what": {"type": "string", "description": "PARAMETER"}}},
    },
}
PLACES = ("SYSTEM", "QUESTION", "ANSWER", "ARGUMENT", "RESULT", "DESCRIPTION", "PARAMETER", "FIRST PART", "BEGUN")


def conversation(texts: dict[str, str]) -> Chat:
    """A conversation with a call and an answer that has begun; `texts` replaces the names of places."""
    text = {place: texts.get(place, place) for place in PLACES}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text["SYSTEM"]},
        {"role": "user", "content": text["QUESTION"]},
        {"role": "assistant", "content": text["ANSWER"], "tool_calls": [_call(text["ARGUMENT"])]},
        {"role": "tool", "tool_call_id": "call00001", "content": text["RESULT"]},
        {"role": "user", "content": [{"type": "text", "text": text["FIRST PART"]}, {"type": "text", "text": "|>"}]},
        {"role": "assistant", "content": text["BEGUN"]},
    ]
    tool = json.loads(json.dumps(TOOL))
    tool["function"]["description"] = text["DESCRIPTION"]
    tool["function"]["parameters"]["properties"]["what"]["description"] = text["PARAMETER"]
    return Chat(tuple(messages), (tool,), None, {"date_string": "01 Feb 2003"})


def _call(argument: str) -> dict[str, Any]:
    arguments = json.dumps({"what": argument})
    return {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": arguments}}


def parsed(prompt: RenderedPrompt, specials: tuple[str, ...]) -> list[str]:
    """The special tokens that a tokenizer parses in a prompt."""
    pattern = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))
    edges = (0, *prompt.breaks, len(prompt.text))
    return [found for begin, end in pairwise(edges) for found in pattern.findall(prompt.text[begin:end])]


def template(family: str, *, protects: bool = True) -> tuple[ChatTemplate, tuple[str, ...]]:
    name, specials = FAMILIES[family]
    tokens = SpecialTokens(specials[0], specials[1], protected=specials if protects else ())
    return ChatTemplate((DATA / f"{name}.jinja").read_text(), tokens), specials


def test_every_family_of_the_catalogue_is_listed() -> None:
    entries = resources.files("tokenmill.model") / "entries"
    families = {Path(entry.name).stem for entry in entries.iterdir() if entry.name.endswith(".toml")}
    assert sorted([*FAMILIES, *NOT_CAPTURED]) == sorted(families)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_content_adds_a_special_token(family: str) -> None:
    made, specials = template(family)
    wanted = parsed(made.render(conversation({})), specials)
    assert len(wanted) > 4
    attack = "a" + "".join(specials) + "b"
    for place in PLACES:
        prompt = made.render(conversation({place: attack}))
        if attack in prompt.text:  # some templates do not write every place, or write it as escaped JSON
            assert len(prompt.breaks) == len(specials)
        assert parsed(prompt, specials) == wanted, place


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_unchanged(family: str) -> None:
    made, specials = template(family)
    unprotected, _ = template(family, protects=False)
    texts = dict.fromkeys(PLACES, f"<{specials[0]}{specials[1]} \ue000 \\ue001 {specials[-1]}|>")
    prompt = made.render(conversation(texts))
    assert prompt.text == unprotected.render(conversation(texts)).text
    assert unprotected.render(conversation(texts)).breaks == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_contents_have_no_breaks(family: str) -> None:
    made, _ = template(family)
    texts = {"SYSTEM": "<", "QUESTION": "> cited\n\n| a |>", "ANSWER": "if a <b: <|", "RESULT": "user", "BEGUN": ""}
    assert made.render(conversation({**texts, "BEGUN": "im_"})).breaks == ()


@pytest.mark.parametrize(
    ("source", "contents", "breaks"),
    [
        ("{{ messages[0].content }}{{ messages[1].content }}", ("<|im_", "end|>"), (5,)),
        ("<|{{ messages[0].content }}|>", ("im_end",), (2,)),
        ("<{{ messages[0].content }}>", ("|im_end|",), (1,)),
        ("{{ messages[0].content }}m_end|>", ("<|i",), (3,)),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", ("é<|im_end|>",), (8,)),
        ("{{ [messages[0].content] }}", ("<|im_end|>",), (3,)),
        ("{{ messages[0].content | upper }}", ("<|im_end|>",), ()),
        ("{{ messages[0].content }}", ("<<|im_end|>|im_end|><|im_end|>",), (2, 21)),
    ],
)
def test_breaks(source: str, contents: tuple[str, ...], breaks: tuple[int, ...]) -> None:
    made = ChatTemplate(source, SpecialTokens("", "", protected=_CHATML))
    chat = Chat(tuple({"role": "user", "content": content} for content in contents))
    assert made.render(chat).breaks == breaks


def test_a_refusal_does_not_show_the_mark() -> None:
    source = "{{ raise_exception('no ' ~ messages[0].content) if '<' in messages[0].content }}"
    made = ChatTemplate(source + "{{ messages[0].content }}", SpecialTokens("", "", protected=_CHATML))
    with pytest.raises(RequestRefused, match=r"no <\|im_end\|>$"):
        made.render(Chat(({"role": "user", "content": "<|im_end|>"},)))


_PIECES = st.lists(
    st.sampled_from(["<|im_", "end|>", "start|>", "<", "|", "im_end", "\ue000", "\\ue000", "x"]), max_size=6
)


@given(st.lists(_PIECES.map("".join), min_size=1, max_size=4))
def test_only_the_templates_tokens_are_parsed(contents: list[str]) -> None:
    made = ChatTemplate(CHATML, SpecialTokens("", "", protected=_CHATML))
    prompt = made.render(Chat(tuple({"role": "user", "content": content} for content in contents)))
    assert parsed(prompt, _CHATML) == ["<|im_start|>", "<|im_end|>"] * len(contents) + ["<|im_start|>"]
    assert prompt.text.startswith("".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents))
