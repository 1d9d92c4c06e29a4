"""Conversations become prompts, or are refused with a helpful message."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Chat
from tokenmill.errors import ModelError, RequestRefused
from tokenmill.native.chat.template import CHATML, ChatTemplate, SpecialTokens, TemplateSource, template_of

DATA = Path(__file__).parents[3] / "data" / "templates"
NO_TOKENS = SpecialTokens("", "")
NOON = datetime(2026, 3, 4, 12)
ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: Any, **more: Any) -> Chat:
    return Chat(messages or (user("hi"),), **more)


def render(source: str, given_chat: Chat | None = None, **more: Any) -> str:
    return ChatTemplate(source, SpecialTokens("<s>", "</s>", **more)).render(given_chat or chat(), now=NOON).text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ECHO, "user:hi;>"),
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ messages[0].content }}{{ date_string }}|{{ datetime }}", "hi04 Mar 2026|Mar 04 2026"),
        ("{{ messages[0].content }}{{ strftime_now('%Y-%m-%d') }}", "hi2026-03-04"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ messages[0].content }}{{ tools is defined }}", "hiFalse"),
        ("  {% if true %}\n{{ messages[0].content }}\n  {% endif %}\nend\n", "hi\nend"),
    ],
)
def test_arguments_of_a_template(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    ("given_arguments", "expected"),
    [
        ({}, "hi||<a><think>"),
        ({"enable_thinking": False}, "hi||<a>"),
        ({"reasoning_effort": "low"}, "hi|low|<a><think>"),
        ({"preserve_reasoning": True}, "hi||False<a><think>"),
        ({"preserve_reasoning": True, "clear_thinking": True}, "hi||True<a><think>"),
    ],
)
def test_template_arguments(given_arguments: dict[str, Any], expected: str) -> None:
    source = (
        "{{ messages[0].content }}|{{ reasoning_strength }}|{{ clear_thinking }}"
        "{% if add_generation_prompt %}<a>{% if enable_thinking %}<think>{% endif %}{% endif %}"
    )
    assert render(source, chat(template_arguments=given_arguments)) == expected


def test_the_answer_begins_where_it_is_computed() -> None:
    text = render(CHATML, chat(user("Count"), {"role": "assistant", "content": "1, 2,"}))
    assert text == "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n1, 2,"


@pytest.mark.parametrize(
    ("metadata", "source", "words"),
    [
        ({"tokenizer.chat_template": "a"}, TemplateSource("a"), ()),
        ({"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}, TemplateSource("a", "b"), ()),
        ({"tokenizer.chat_template.tool_use": "b"}, TemplateSource("b", "b"), ("is for tools",)),
        (
            {"tokenizer.chat_template": "a", "tokenizer.chat_template.rag": "c"},
            TemplateSource("a"),
            ("'rag' is not used",),
        ),
        ({"tokenizer.ggml.model": "gpt2"}, TemplateSource(CHATML), ("no chat template",)),
        ({"tokenizer.chat_template": ""}, TemplateSource(CHATML), ("no chat template",)),
        ({"tokenizer.chat_template": 7}, TemplateSource(CHATML), ("no chat template",)),
    ],
)
def test_templates_in_a_model_file(metadata: dict[str, object], source: TemplateSource, words: tuple[str, ...]) -> None:
    found, notes = template_of(metadata)
    assert found == source
    assert len(notes) == len(words)
    assert all(part in note for part, note in zip(words, notes, strict=True))


def test_conversations_with_tools_have_their_own_template() -> None:
    template = ChatTemplate(
        TemplateSource("plain {{ messages[0].content }}", "tools {{ messages[0].content }}"), NO_TOKENS
    )
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(chat()).text == "plain hi"
    assert template.render(chat(tools=(tool,))).text == "tools hi"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (CHATML, False),
        ("{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}", True),
        ("{{ raise_exception('no tools') if tools }}{{ messages[0].content }}", False),
    ],
)
def test_a_template_without_a_place_for_tools_says_so(source: str, shown: bool) -> None:
    template = ChatTemplate(source, NO_TOKENS)
    assert template.shows_tools is shown
    assert any("does not support tools" in note for note in template.notes) is not shown


def test_a_bad_template_for_tools_is_done_without() -> None:
    template = ChatTemplate(TemplateSource("plain {{ messages[0].content }}", "{% for %}"), NO_TOKENS)
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(chat(tools=(tool,))).text == "plain hi"
    assert template.notes[0].endswith("the default template is used for conversations with tools, too")


@pytest.mark.parametrize(("adds", "expected"), [(True, "hi"), (False, "<s>hi</s>")])
def test_what_the_tokenizer_adds_is_left_out(adds: bool, expected: str) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert render(source, adds_bos=adds, adds_eos=adds) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "line 1"),
        ("{{ x | shout }}", "shout"),
        ("(" * 5 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{% for x in y %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
    ],
)
def test_a_template_that_cannot_be_compiled(source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as refused:
        ChatTemplate(source, NO_TOKENS)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "chat_template_refused", "Roles must alternate!"),
        ("{{ messages[0].content + 1 + none.x.y() }}", "chat_template_failed", "no attribute 'x'"),
        ("{{ 1 / 0 }}", "chat_template_failed", "division by zero"),
        ("{{ missing() }}", "chat_template_failed", "'missing' is undefined"),
        ("{{ messages[0].shout() }}", "chat_template_failed", "has no attribute 'shout'"),
        ("{{ messages | tojson(7, 8, 9, 10, 11) }}", "chat_template_failed", "positional arguments"),
        ("{% include 'x' %}", "chat_template_failed", "no loader"),
        ("{% import 'x' as y %}", "chat_template_failed", "no loader"),
        ("{% extends 'x' %}", "chat_template_failed", "no loader"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat_template_failed", "recursion"),
        ("{% set l = [] %}{% set _ = l.append(l) %}{{ l | tojson }}", "chat_template_failed", "Circular"),
    ],
)
def test_a_refusal_shows_the_templates_words(source: str, code: str, words: str) -> None:
    with pytest.raises(RequestRefused, match=words) as refused:
        render(source)
    assert refused.value.code == code
    assert refused.value.hint


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ([{"role": "assistant", "content": ""}], "messages[1] is an empty assistant message"),
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "messages[2] is the second"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], "with tool calls"),
    ],
)
def test_answers_that_cannot_be_continued(last: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        render(ECHO, chat(user("hi"), *last))
    assert words in refused.value.message
    assert refused.value.hint


def test_half_a_character_is_named() -> None:
    with pytest.raises(RequestRefused, match=r"messages\[1\]"):
        render(ECHO, chat(user("ok"), user("\ud83d")))


@given(st.lists(st.tuples(st.sampled_from(["user", "system", "tool"]), TEXT), min_size=1, max_size=6))
def test_every_text_comes_through(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert _CHATML.render(chat(*messages)).text == f"{expected}<|im_start|>assistant\n"


def test_a_template_changes_nothing_it_was_given() -> None:
    source = (
        "{% set _ = messages.append(1) %}{% set _ = tools[0].function.parameters.required.pop() %}{{ messages[0] }}"
    )
    parameters = {"type": "object", "properties": {}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    given_chat = chat(tools=(tool,))
    template = ChatTemplate(source, NO_TOKENS)
    assert template.render(given_chat) == template.render(given_chat)
    assert parameters["required"] == ["a"]
    assert len(given_chat.messages) == 1


def test_one_template_changes_nothing_for_the_next() -> None:
    shrinking = (
        "{% for t in tools %}{% set _ = t.function.parameters.required.append('x') %}{% endfor %}{{ messages.pop() }}"
    )
    before = ChatTemplate((DATA / "qwen3.jinja").read_text(), NO_TOKENS)
    ChatTemplate(shrinking, NO_TOKENS)
    after = ChatTemplate((DATA / "qwen3.jinja").read_text(), NO_TOKENS)
    asked = chat(user("hi"), {"role": "assistant", "content": "a", "reasoning_content": "b"})
    assert before.render(asked) == after.render(asked)


_CHATML = ChatTemplate(CHATML, NO_TOKENS)
