"""What a model thought and what it answered, told apart by the marks it writes.

The marks are those that makers of models publish in their templates. A template may open the thinking itself, at the
end of the prompt: then only the closing mark is in the text, and in an answer that was cut off neither; `opened` says
that this is how the model is asked. Where nothing is marked there is no reasoning, and nothing is guessed.
"""

import re
from dataclasses import dataclass
from typing import Final

THINK: Final = ("<think>", "</think>")
_MARKS: Final[tuple[tuple[str, str], ...]] = (
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
# Marks that may stand without the opening one, because templates write that into the prompt.
_OPENED: Final = tuple(pair for pair in _MARKS if pair[0] not in ("<thinking>", "<reasoning>"))
# What some of them put around the answer that follows.
_WRAPPERS: Final[tuple[tuple[str, str], ...]] = (
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
)
_CHANNEL: Final = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>")  # gpt-oss: one message for each channel
_CHANNEL_END: Final = re.compile(r"<\|(?:end|return|call|start)\|>")
_GRANITE: Final = re.compile(  # 3.2
    r"(?:Here's|Here is) my thought process:(.*?)(?:(?:Here's|Here is) my response:(.*)|\Z)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Parted:
    """One answer's two parts."""

    answer: str
    reasoning: str | None = None  # None: the model marked none
    by_template: bool = False  # only the closing mark was there: the template opened the thinking


def part(text: str, *, cut: bool = False, opened: bool = False) -> Parted:
    """Reasoning and answer of a text; `cut`: it ended at the limit of tokens; `opened`: templates open the thinking."""
    begun = text.lstrip()
    if _CHANNEL.match(begun.removeprefix("<|start|>assistant")):
        return _by_channels(begun)
    if granite := _GRANITE.match(begun):
        return Parted((granite[2] or "").strip(), granite[1].strip())
    for start, end in _MARKS:
        if begun.startswith(start):
            thought, closed, rest = begun[len(start) :].partition(end)
            return Parted(_unwrapped(rest) if closed else "", thought.strip())
    closings = ((text.find(end), start, end) for start, end in _OPENED)
    found = min((each for each in closings if each[0] >= 0), default=None)
    if found is not None and found[1] not in text[: found[0]]:
        return Parted(_unwrapped(text[found[0] + len(found[2]) :]), text[: found[0]].strip(), by_template=True)
    if opened and cut:
        return Parted("", text.strip())
    return Parted(text)


def has_marks(text: str) -> bool:
    """Whether there is reasoning in a text."""
    return part(text).reasoning is not None


def together(answer: str, reasoning: str | None) -> str:
    """Both parts in the marks that most templates and trainers know."""
    return answer if reasoning is None else f"{THINK[0]}\n{reasoning}\n{THINK[1]}\n\n{answer}"


def _by_channels(text: str) -> Parted:
    """Messages on channels: `final` is the answer, all others are thought."""
    thoughts = list[str]()
    answers = list[str]()
    found = list(_CHANNEL.finditer(text))
    for number, match in enumerate(found):
        until = found[number + 1].start() if number + 1 < len(found) else len(text)
        message = _CHANNEL_END.split(text[match.end() : until], maxsplit=1)[0]
        (answers if match[1] == "final" else thoughts).append(message.strip())
    return Parted("\n\n".join(answers), "\n\n".join(thoughts) if thoughts else None)


def _unwrapped(text: str) -> str:
    rest = text.strip() if text.strip() else ""
    for start, end in _WRAPPERS:
        if rest.startswith(start):
            return rest.removeprefix(start).removesuffix(end).strip()
    return rest
