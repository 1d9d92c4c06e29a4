"""Separates a model's reasoning from its answer by the tags in its output: `split_reasoning`.

The tags are those of published chat templates. If the template itself opens the reasoning at the end of the prompt, the
output has only the closing tag, or none if it was cut off (`opened`). Text without tags is not split.
"""

import re
from dataclasses import dataclass
from typing import Final

THINK: Final = ("<think>", "</think>")
TAGS: Final[tuple[tuple[str, str], ...]] = (
    THINK,  # DeepSeek R1, Qwen3, QwQ, Kimi K2, GLM, MiniMax M2, Hunyuan, Granite 3.3, LFM2, ...
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<longcat_think>", "</longcat_think>"),  # LongCat
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ("◁think▷", "◁/think▷"),  # Kimi-VL, Kimi K1.5
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
)
# Pairs of which the prompt may contain the opening tag.
_OPENED: Final = tuple(pair for pair in TAGS if pair[0] not in ("<thinking>", "<reasoning>"))
# Wrappers that some models put around the answer.
WRAPPERS: Final[tuple[tuple[str, str], ...]] = (
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
)
_CHANNEL: Final = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>")  # gpt-oss: one message per channel
_CHANNEL_END: Final = re.compile(r"<\|(?:end|return|call|start)\|>")
_GRANITE: Final = re.compile(  # 3.2
    r"(?:Here's|Here is) my thought process:(.*?)(?:(?:Here's|Here is) my response:(.*)|\Z)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class SplitReasoning:
    """Reasoning and answer of one output."""

    answer: str
    reasoning: str | None = None  # None: no tags
    by_template: bool = False  # only the closing tag was found: the template opened the reasoning


def split_reasoning(text: str, *, cut: bool = False, opened: bool = False) -> SplitReasoning:
    """Split a text; `cut`: it ended at max_tokens; `opened`: the template opens the reasoning in the prompt."""
    begun = text.lstrip()
    if _CHANNEL.match(begun.removeprefix("<|start|>assistant")):
        return _by_channels(begun)
    if granite := _GRANITE.match(begun):
        return SplitReasoning((granite[2] or "").strip(), granite[1].strip())
    for start, end in TAGS:
        if begun.startswith(start):
            thought, closed, rest = begun[len(start) :].partition(end)
            return SplitReasoning(_unwrapped(rest) if closed else "", thought.strip())
    closings = ((text.find(end), start, end) for start, end in _OPENED)
    found = min((each for each in closings if each[0] >= 0), default=None)
    if found is not None and found[1] not in text[: found[0]]:
        return SplitReasoning(_unwrapped(text[found[0] + len(found[2]) :]), text[: found[0]].strip(), by_template=True)
    if opened and cut:
        return SplitReasoning("", text.strip())
    return SplitReasoning(text)


def opened_by(prompt: str) -> str:
    """The tag with which a prompt opens the reasoning or the answer at its end; empty if it does not."""
    end = prompt[-64:].rstrip()
    return next((start for start, _ in (*_OPENED, *WRAPPERS) if end.endswith(start)), "")


def has_reasoning(text: str) -> bool:
    """Whether a text contains tagged reasoning."""
    return split_reasoning(text).reasoning is not None


def join_reasoning(answer: str, reasoning: str | None) -> str:
    """The answer with its reasoning in front, in <think> tags."""
    return answer if reasoning is None else f"{THINK[0]}\n{reasoning}\n{THINK[1]}\n\n{answer}"


def _by_channels(text: str) -> SplitReasoning:
    """Split channel messages: `final` is the answer, all others are reasoning."""
    thoughts = list[str]()
    answers = list[str]()
    found = list(_CHANNEL.finditer(text))
    for number, match in enumerate(found):
        until = found[number + 1].start() if number + 1 < len(found) else len(text)
        message = _CHANNEL_END.split(text[match.end() : until], maxsplit=1)[0]
        (answers if match[1] == "final" else thoughts).append(message.strip())
    return SplitReasoning("\n\n".join(answers), "\n\n".join(thoughts) if thoughts else None)


def _unwrapped(text: str) -> str:
    rest = text.strip() if text.strip() else ""
    for start, end in WRAPPERS:
        if rest.startswith(start):
            return rest.removeprefix(start).removesuffix(end).strip()
    return rest
