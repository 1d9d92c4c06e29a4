"""Template families that llama.cpp treats specially, recognized by parts of their source.

For most templates, `capabilities.py` decides how a conversation is changed. These families expect what their makers'
own code sends: reasoning under another name, tool results in another place. Each also has its own header for an answer
whose beginning the caller gives.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.native.chat.messages import ChatMessage, joined
from tokenmill.native.chat.reasoning import Marks

Arguments = dict[str, Any]
Adjust = Callable[[list[ChatMessage], Arguments], list[ChatMessage]]


@dataclass(frozen=True, slots=True)
class TemplateFamily:
    """One family: its reasoning marks, and how messages and the answer's header differ."""

    name: str
    marks: Marks | Callable[[Arguments], Marks]
    header: str | None = None  # the answer's header; None: the template writes it
    adjust: Adjust = lambda messages, _arguments: messages
    after: str = ""  # the header is written only after this
    omits_empty_reasoning: bool = False  # without reasoning, its start mark is omitted

    def marks_for(self, arguments: Arguments) -> Marks:
        """The reasoning marks, which may depend on the template's arguments."""
        return self.marks if isinstance(self.marks, Marks) else self.marks(arguments)


def family_of(source: str) -> TemplateFamily | None:
    """The first family that matches the source; None if none does."""
    for needed, absent, family in _FAMILIES:
        if all(part in source for part in needed) and not any(part in source for part in absent):
            return family(source) if callable(family) else family
    return None


def _thinking_twice(messages: list[ChatMessage], _arguments: Arguments) -> list[ChatMessage]:
    return [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]


def _harmony(messages: list[ChatMessage], arguments: Arguments) -> list[ChatMessage]:
    """Reasoning as `thinking`; a message with tool calls and reasoning loses its content."""
    changed = []
    for message in _thinking_twice(messages, arguments):
        alone = "thinking" in message and "tool_calls" in message
        changed.append({name: value for name, value in message.items() if not (alone and name == "content")})
    return changed


def _thinking_parts(messages: list[ChatMessage], _arguments: Arguments) -> list[ChatMessage]:
    """Reasoning as the first part of the content."""
    changed = []
    for message in messages:
        if message["role"] in {"system", "assistant"}:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            if "reasoning_content" in message:
                parts.insert(0, {"type": "thinking", "thinking": message["reasoning_content"]})
            message = {**message, "content": parts}  # noqa: PLW2901
            message.pop("reasoning_content", None)
        changed.append(message)
    return changed


def _always_reasoning(messages: list[ChatMessage], _arguments: Arguments) -> list[ChatMessage]:
    return [
        {**m, "reasoning_content": m.get("reasoning_content", "")} if m["role"] == "assistant" else m for m in messages
    ]


def _in_order_of_calls(messages: list[ChatMessage], _arguments: Arguments) -> list[ChatMessage]:
    """Each run of tool results, sorted by the order of the calls."""
    changed = list(messages)
    order: dict[str, int] = {}
    place = 0
    while place < len(changed):
        message = changed[place]
        if message["role"] == "assistant" and "tool_calls" in message:
            order = {call["id"]: number for number, call in enumerate(message["tool_calls"]) if "id" in call}
        end = place
        while end < len(changed) and changed[end]["role"] in {"user", "tool"}:
            end += 1
        results = [index for index in range(place, end) if changed[index]["role"] == "tool"]
        ordered = sorted((changed[index] for index in results), key=lambda m: order.get(m.get("tool_call_id", ""), 0))
        for index, result in zip(results, ordered, strict=True):
            changed[index] = result
        place = max(end, place + 1)
    return changed


def _results_with_calls(messages: list[ChatMessage], _arguments: Arguments) -> list[ChatMessage]:
    """Calls, their results and the answer after them merged into one assistant message."""
    changed: list[ChatMessage] = []
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        if message["role"] != "assistant" or "tool_calls" not in message:
            changed.append(message)
            continue
        turn: ChatMessage = {"role": "assistant", "tool_calls": message["tool_calls"]}
        results: list[dict[str, Any]] = []
        while waiting and waiting[0]["role"] == "tool":
            result = waiting.pop(0)
            calls = message["tool_calls"]
            name = calls[len(results)]["function"]["name"] if len(results) < len(calls) else ""
            results.append({"name": name or result.get("tool_call_id", ""), "response": _read(result["content"])})
        if results:
            turn["tool_responses"] = results
        if waiting and waiting[0]["role"] == "assistant" and "tool_calls" not in waiting[0] and waiting[0]["content"]:
            turn["content"] = waiting.pop(0)["content"]
        if "reasoning_content" in message:
            turn["reasoning_content"] = message["reasoning_content"]
        changed.append(turn)
    return changed


def _read(content: Any) -> Any:
    try:
        return json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        return content


def _with_languages(messages: list[ChatMessage], arguments: Arguments) -> list[ChatMessage]:
    """User content with the source and target language."""
    codes = {name: arguments.get(name, "en-GB") for name in ("source_lang_code", "target_lang_code")}
    return [
        {**m, "content": [{"type": "text", "text": joined(m["content"], "\n"), **codes}]} if m["role"] == "user" else m
        for m in messages
    ]


def _deepseek(source: str) -> TemplateFamily:
    if "function_calls" in source:
        return TemplateFamily("DeepSeek V3.2", _THINK, "<｜Assistant｜>")
    return TemplateFamily("DeepSeek V4", _THINK, "<｜Assistant｜>", _in_order_of_calls, omits_empty_reasoning=True)


def _qwen_coder(source: str) -> TemplateFamily:
    thinks = Marks("<think>\n", "\n</think>\n\n", True) if "<think>" in source else Marks()
    return TemplateFamily("Qwen3-Coder", thinks, "<|im_start|>assistant\n")


def _gemma4(source: str) -> TemplateFamily:
    family = TemplateFamily(
        "Gemma 4", Marks("<|channel>thought\n", "<channel|>", True), "<|turn>model\n", after="<turn|>\n"
    )
    return family if "{#- OpenAI Chat Completions:" in source else replace(family, adjust=_results_with_calls)


def _horizon(source: str) -> TemplateFamily:
    tags = {"medium": "ifm|think_fast", "low": "ifm|think_faster"}

    def marks(arguments: Arguments) -> Marks:
        silent = arguments.get("enable_thinking") is False and "enable_thinking" in source
        tag = "ifm|think" if silent else tags.get(arguments.get("reasoning_effort", ""), "ifm|think")
        return Marks(f"<{tag}>\n", f"</{tag}>", True)

    return TemplateFamily("K2 Horizon", marks, "<|ifm|im_start|>assistant\n", _always_reasoning)


_THINK = Marks("<think>", "</think>", True)
_HARMONY = Marks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>", True)

# Parts of the source that must be present, parts that must be absent, the family; the first match counts.
_FAMILIES: tuple[tuple[tuple[str, ...], tuple[str, ...], TemplateFamily | Callable[[str], TemplateFamily]], ...] = (
    (
        ("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]"),
        ("[CALL_ID]",),
        TemplateFamily("Ministral 3", Marks("[THINK]", "[/THINK]", True), "", _thinking_parts),
    ),
    (("<|channel|>",), (), TemplateFamily("gpt-oss", _HARMONY, "<|start|>assistant", _harmony)),
    (
        ("<atem:function_calls>", "<|eom|>"),
        (),
        TemplateFamily(
            "Muse Glimmer",
            Marks(" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>", True),
            "<|start|>assistant",
        ),
    ),
    (
        (">>>all", ">>>${recipient}"),
        (),
        TemplateFamily("Functionary 3.2", Marks(), "<|start_header_id|>assistant<|end_header_id|>\n\n>>>all\n"),
    ),
    (
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        (),
        TemplateFamily("Kimi K2", _THINK, "<|im_assistant|>assistant<|im_middle|>"),
    ),
    (
        ("<|open|>", "<|close|>", "<|end_of_msg|>"),
        (),
        TemplateFamily(
            "Kimi K3",
            Marks("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>", True),
            '<|open|>message role="assistant"<|sep|>',
        ),
    ),
    (("<|ifm|im_start|>", "<ifm|tool_calls>"), (), _horizon),
    (("<role>ASSISTANT</role>", "<arg_key>"), (), TemplateFamily("Ling 3", _THINK, "<role>ASSISTANT</role>\n")),
    (
        ("<|START_TEXT|>", "<|START_ACTION|>"),
        (),
        TemplateFamily(
            "Cohere2 MoE",
            Marks("<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>", True),
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
    ),
    (
        ("<|tool_list_start|>", "<|tool_list_end|>"),
        (),
        TemplateFamily("LFM2", _THINK, "<|im_start|>assistant\n", _thinking_twice),
    ),
    (
        ("List of tools: [",),
        ("<|tool_list_start|>",),
        TemplateFamily("LFM2.5", _THINK, "<|im_start|>assistant\n", _thinking_twice),
    ),
    (
        ("<|role_sep|>", "<|message_sep|>"),
        ("<|function_call|>",),
        TemplateFamily("GigaChat 3", Marks(), "assistant<|role_sep|>\n"),
    ),
    (
        ("]<]minimax[>[", "<tool_call>", "<invoke name="),
        (),
        TemplateFamily("MiniMax M3", Marks("<mm:think>", "</mm:think>", True)),
    ),
    (("dsml_token", "DSML", "function_calls"), (), _deepseek),
    (("dsml_token", "DSML", "tool_calls"), (), _deepseek),
    (("'<|tool_call>call:'",), (), _gemma4),
    (
        ("Tool usage guidelines:", '<function name="', '<param name="'),
        (),
        TemplateFamily("MiniCPM5", Marks("<think>\n", "\n</think>\n\n", True), "<|im_start|>assistant\n"),
    ),
    (
        ("[source_lang_code]", "[target_lang_code]"),
        (),
        TemplateFamily("TranslateGemma", Marks(), "<start_of_turn>model\n", _with_languages),
    ),
    (("<tool_call>", "<function=", "<parameter="), ("'<tool_call><function=' ~ tool_call.name ~ '>'",), _qwen_coder),
)
