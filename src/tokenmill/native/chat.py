"""Chat templates: a conversation written out as the prompt its model was trained on.

The text is what the embedded llama-server's `/apply-template` writes for the same model and request. So are the
changes to a conversation before its template sees it (`chat_messages`, `chat_families`), what the template is told
beside it (`date_string`, `datetime` and `strftime_now` of today, `enable_thinking`, true where the template knows of
it), and the way an answer begun by the caller, a last message of the assistant's, is gone on with.

Different on purpose:
- Where llama.cpp's engine departs from Jinja the model's makers meant Jinja: numbers keep all their digits, lengths
  count characters, `dictsort` takes large and small letters alike, `trim` takes off every kind of space, a list or
  mapping that is written out looks as in Python (there: some quotes differ, or nothing is written at all).
- A last message of the assistant's that is empty is refused; llama-server drops it, and the answer's header with it.
- Template arguments cannot take the place of the conversation, the tools or the special tokens.
- Parts of content other than text are refused; a message may say null where it could leave a field out.
- No template of its own in the file and a Mistral vocabulary: ChatML, not the bare word `mistral-v7-tekken`.

A template may be hostile: see `chat_sandbox`. `date_string` changes at midnight and with it, for templates that use
it, the head of every prompt: a template argument of that name holds it still.
"""

import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from tokenmill.engine.engine import Chat
from tokenmill.errors import ModelError, RequestRefused
from tokenmill.native.chat_budget import Exhausted, Failed, Limits, Refusal
from tokenmill.native.chat_families import Family, family_of
from tokenmill.native.chat_messages import (
    Message,
    adapted,
    arguments_of,
    fitted,
    joined,
    messages_of,
    tools_of,
    unreadable,
)
from tokenmill.native.chat_probe import capabilities, shows_tools
from tokenmill.native.chat_reasoning import Marks, alike, marks
from tokenmill.native.chat_values import Witness
from tokenmill.native.chat_words import clock, sandbox

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role + '\\n' + message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_KEY = "tokenizer.chat_template"
_PROBE_LIMITS = Limits(steps=500_000, steps_a_message=0, characters=8 << 20, output=1 << 20)
# Checks in published templates that refuse conversations which are in order; llama.cpp takes them out, too.
_NEEDLESS = (
    '{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}',
    "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
    "(message['tool_calls'] is not defined or message['tool_calls'] is none or message['tool_calls']|length == 0) %}",
)
_TRIMMING = "You have access to the following functions in JSONSchema format"  # StepFun: space drives it in circles


@dataclass(frozen=True, slots=True)
class Source:
    """A model's templates; `tool_use` is for conversations with tools, where there is one."""

    default: str
    tool_use: str | None = None


class Found(NamedTuple):
    """What was found in a model file."""

    source: Source
    notes: tuple[str, ...]


def template_of(metadata: Mapping[str, object]) -> Found:
    """The templates in a GGUF file's metadata, chosen as llama.cpp does; the notes say what is out of the ordinary."""
    named = {key.removeprefix(f"{_KEY}."): value for key, value in metadata.items() if key.startswith(f"{_KEY}.")}
    default = metadata.get(_KEY)
    tool_use = named.pop("tool_use", None)
    default, tool_use = (value if isinstance(value, str) and value else None for value in (default, tool_use))
    notes = [f"the model's chat template {name!r} is not used" for name in sorted(named)]
    if default is None and tool_use is not None:
        default = tool_use
        notes.append("the model has a chat template for tools alone: it is used for every conversation")
    if default is None:
        notes.append("the model has no chat template: conversations are written as ChatML, which may not be its form")
    return Found(Source(default or CHATML, tool_use), tuple(notes))


class Template:
    """A model's template, compiled once; may be used by several threads."""

    def __init__(
        self,
        source: str | Source,
        *,
        bos: str,
        eos: str,
        adds_bos: bool = False,
        adds_eos: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """adds_bos, adds_eos: the tokenizer adds them, so the text leaves them out. ModelError: it does not compile."""
        given = source if isinstance(source, Source) else Source(source)
        tokens = _Tokens(bos, eos, adds_bos, adds_eos)
        self.notes: tuple[str, ...] = ()
        self._default = self._tool_use = _Form(given.default, tokens, limits or Limits())
        if given.tool_use not in {None, given.default}:
            try:
                self._tool_use = _Form(given.tool_use or "", tokens, limits or Limits())
            except ModelError as error:
                self.notes = (f"{error.message}; conversations with tools are written by the other one",)
        self.shows_tools = self._tool_use.shows_tools
        if not self.shows_tools:
            self.notes += ("the model's chat template has no place for tools: it is not told of those in a request",)

    def render(self, chat: Chat, *, now: datetime | None = None) -> str:
        """The prompt, ending where the answer begins. RequestRefused: the conversation does not fit the template."""
        form = self._tool_use if chat.tools else self._default
        try:
            text = form.prompt(chat, now or datetime.now())
        except Refusal as error:
            message = f"the model's chat template refused the conversation: {error}"
            raise RequestRefused(message, hint="change the messages as it asks") from None
        except Exhausted as error:
            message = f"the model's chat template was stopped: {error}"
            hint = "shorten the conversation; if it is short, the template is broken"
            raise RequestRefused(message, hint=hint) from None
        except Failed as error:
            message = f"the model's chat template failed on this conversation: {error}"
            hint = "try it without tools or a system message, or send the prompt as text"
            raise RequestRefused(message, hint=hint) from None
        try:
            text.encode()
        except UnicodeEncodeError:
            where = unreadable(chat.messages) or "the conversation"
            hint = "send valid Unicode: half of a surrogate pair is none"
            raise RequestRefused(f"{where} holds text that is not Unicode", hint=hint) from None
        return text


@dataclass(frozen=True, slots=True)
class _Tokens:
    bos: str
    eos: str
    adds_bos: bool
    adds_eos: bool

    def bare(self, text: str) -> str:
        """The text without what the tokenizer will add."""
        if self.adds_bos:
            text = text.removeprefix(self.bos)
        return text.removesuffix(self.eos) if self.adds_eos else text


class _Form:
    """One template with what is known of it."""

    def __init__(self, source: str, tokens: _Tokens, limits: Limits) -> None:
        if source == "chatml":
            source = CHATML
        if "<|channel|>" in source or "[TOOL_CALLS]" in source:
            for check in _NEEDLESS:
                source = source.replace(check, "{%- if false %}")
        self._source = source
        self._tokens = tokens
        self._lock = threading.Lock()
        self._sandbox = sandbox(_PROBE_LIMITS)
        try:
            self._compiled = self._sandbox.prepared(source)
        except Failed as error:
            message = f"the model's chat template cannot be used: {error}"
            raise ModelError(message, hint="take a newer file of the model, or send prompts as text") from None
        self.can = capabilities(self._probe)
        self.shows_tools = shows_tools(self._probe)
        self._family: Family | None = family_of(source)
        found = Marks() if self._family else marks(self._variant, source, tools=self.can.tool_calls)
        self._marks = found
        self._thinks = self._family.marks_for({}).thinks if self._family else found.thinks
        self._sandbox.limits = limits

    def prompt(self, chat: Chat, now: datetime) -> str:
        """The prompt of a conversation."""
        messages = messages_of(chat)
        tools = tools_of(chat)
        arguments = arguments_of(chat)
        if _TRIMMING in self._source:
            messages = [_trimmed(message) for message in messages]
        begun = _begun(messages)
        written = fitted(messages if begun is None else messages[:-1], self.can)
        written = adapted(written, self.can, developers="<|channel|>" in self._source)
        if self._family:
            written = self._family.adjust(written, arguments)
        values = self._values(written, tools, arguments, now)
        if begun is None:
            return self._headed(self._run({**values, "add_generation_prompt": True}))
        return self._continued(values, begun, arguments)

    def _continued(self, values: dict[str, object], begun: Message, arguments: dict[str, Any]) -> str:
        """The prompt with an answer that goes on where the caller's ends."""
        again = {name: deepcopy(value) if isinstance(value, list) else value for name, value in values.items()}
        text = self._run(values)  # which may change the lists
        family = self._family
        found = family.marks_for(arguments) if family else self._marks
        if family and family.header is not None:
            header = family.header if text.endswith(family.after) else ""
        else:
            longer = self._run({**again, "add_generation_prompt": True})
            header = longer[alike(text, longer) :]
            if found.start and not family:
                header = header.partition(found.start)[0]
        if family and family.name == "gpt-oss":  # an earlier answer ended the conversation, this one does not
            text = "<|end|>".join(text.rsplit("<|return|>", 1))
        thought = begun.get("reasoning_content", "")
        answer = joined(begun["content"], "\n\n")
        if found.start:
            header += "" if family and family.says_nothing_of_no_thoughts and not thought else found.start
            header += thought + ("" if thought and not answer else found.end)
        return text + header + answer

    def _headed(self, text: str) -> str:
        """The prompt with an answer's header, which one family's templates leave out at times."""
        family = self._family
        return text + (family.header or "") if family and family.after and text.endswith(family.after) else text

    def _values(
        self, messages: list[Message], tools: list[dict[str, Any]], arguments: dict[str, Any], now: datetime
    ) -> dict[str, object]:
        """What the template is told; later names win."""
        values: dict[str, object] = {"messages": messages, "bos_token": self._tokens.bos, "eos_token": self._tokens.eos}
        kept = arguments.get("preserve_reasoning")
        if isinstance(kept, bool):
            values |= {"preserve_thinking": kept, "clear_thinking": not kept}
            values |= {"truncate_history_thinking": not kept, "drop_thinking": not kept}
        effort = arguments.get("reasoning_effort")
        if isinstance(effort, str) and effort:
            values["reasoning_strength"] = effort
        if tools:
            values["tools"] = tools
        dates = {"datetime": now.strftime("%b %d %Y"), "date_string": now.strftime("%d %b %Y")}
        return {**values, "strftime_now": clock(now), "enable_thinking": self._thinks, **dates, **arguments}

    def _run(self, values: Mapping[str, object], witness: Witness | None = None) -> str:
        with self._lock:
            return self._tokens.bare(self._sandbox.run(self._compiled, values, witness))

    def _probe(self, messages: list[Message], tools: list[dict[str, Any]], witness: Witness) -> str:
        values = {"messages": messages, "tools": tools, "bos_token": "", "eos_token": "", "add_generation_prompt": True}
        return self._run({**values, "strftime_now": clock(datetime(2026, 1, 1))}, witness)

    def _variant(
        self, messages: list[Message], tools: list[dict[str, Any]], headed: bool, thinking: bool
    ) -> str | None:
        """What the template writes for a conversation made up to find its marks; None where it fails."""
        messages, tools = deepcopy((messages, tools))
        values: dict[str, object] = {"messages": fitted(messages, self.can), "enable_thinking": thinking}
        values |= {
            "bos_token": self._tokens.bos,
            "eos_token": self._tokens.eos,
            "strftime_now": clock(datetime(2026, 1, 1)),
        }
        if headed:
            values["add_generation_prompt"] = True
        if tools:
            values["tools"] = tools
        try:
            return self._run(values)
        except Failed:
            return None


def _begun(messages: list[Message]) -> Message | None:
    """The last message, if it is the beginning of the answer."""
    last = messages[-1]
    before = messages[-2:-1]
    if last["role"] != "assistant":
        return None
    place = f"messages[{len(messages) - 1}]"
    if before and before[0]["role"] == "assistant":
        hint = "put them into one, or end with a user message"
        raise RequestRefused(f"{place} is the second assistant message at the end of the conversation", hint=hint)
    if "tool_calls" in last:
        hint = "add the tool's results, each as a message with role tool"
        raise RequestRefused(f"{place} ends the conversation with tool calls, which cannot be gone on with", hint=hint)
    if not last["content"] and not last.get("reasoning_content"):
        hint = "leave it out to get an answer, or give the answer's beginning"
        raise RequestRefused(f"{place} is an empty assistant message at the end of the conversation", hint=hint)
    return last


def _trimmed(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        content = content.strip()
    else:
        content = [{**part, "text": part["text"].strip()} for part in content]
    changed = {**message, "content": content}
    if "reasoning_content" in changed:
        changed["reasoning_content"] = changed["reasoning_content"].strip()
    return changed
