"""Chat templates: renders a conversation as the prompt that the model was trained on.

The text is what llama-server's `/apply-template` returns for the same model and request: `messages.py` and
`families.py` change the conversation as llama.cpp does, the template gets the same variables (`date_string`,
`datetime`, `strftime_now`, `enable_thinking`), and a final assistant message is continued.

Intended differences:
- Where llama.cpp's engine departs from Jinja, this follows Jinja, as the model's makers do: numbers keep all digits,
  lengths count characters, `dictsort` ignores case, `trim` removes all white space, lists and mappings are written as
  in Python.
- A final assistant message that is empty is refused; llama-server drops it.
- Template arguments cannot replace the conversation, the tools or the special tokens.
- Content parts other than text are refused; a message may have null where a field may be missing.
- A Mistral vocabulary without a template gets ChatML, not llama.cpp's built-in `mistral-v7-tekken`.

`date_string` changes at midnight, and with it the prefix of every prompt of a template that uses it; a template
argument of that name fixes it.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from tokenmill.engine.engine import Chat
from tokenmill.errors import ModelError, RequestRefused
from tokenmill.native.chat.capabilities import capabilities, shows_tools
from tokenmill.native.chat.families import TemplateFamily, family_of
from tokenmill.native.chat.messages import (
    ChatMessage,
    adapted,
    arguments_of,
    fitted,
    joined,
    messages_of,
    tools_of,
    unreadable,
)
from tokenmill.native.chat.reasoning import Marks, common_length, marks
from tokenmill.native.chat.sandbox import Sandbox, TemplateError, TemplateRefusal, Witness
from tokenmill.native.chat.special_tokens import RenderedPrompt, SpecialTexts

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role + '\\n' + message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_KEY = "tokenizer.chat_template"
# Checks in published templates that refuse valid conversations; llama.cpp removes them, too.
_NEEDLESS = (
    '{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}',
    "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
    "(message['tool_calls'] is not defined or message['tool_calls'] is none or message['tool_calls']|length == 0) %}",
)
_TRIMMING = "You have access to the following functions in JSONSchema format"  # StepFun: white space makes it loop
_PROBED_ON = datetime(2026, 1, 1)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A model's templates; `tool_use`, where there is one, is for conversations with tools."""

    default: str
    tool_use: str | None = None


class FoundTemplate(NamedTuple):
    """The templates in a model file; `notes` are for the user."""

    source: TemplateSource
    notes: tuple[str, ...]


def template_of(metadata: Mapping[str, object]) -> FoundTemplate:
    """The templates in a GGUF file's metadata, chosen as llama.cpp does."""
    named = {key.removeprefix(f"{_KEY}."): value for key, value in metadata.items() if key.startswith(f"{_KEY}.")}
    default = metadata.get(_KEY)
    tool_use = named.pop("tool_use", None)
    default, tool_use = (value if isinstance(value, str) and value else None for value in (default, tool_use))
    notes = [f"the model's chat template {name!r} is not used" for name in sorted(named)]
    if default is None and tool_use is not None:
        default = tool_use
        notes.append("the model's only chat template is for tools; it is used for every conversation")
    if default is None:
        notes.append("the model has no chat template; ChatML is used, which may not be the format it was trained on")
    return FoundTemplate(TemplateSource(default or CHATML, tool_use), tuple(notes))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The text of a tokenizer's special tokens, and whether the tokenizer adds them to a prompt itself.

    `protected` lists those that are not parsed in message contents (special_tokens.py).
    """

    bos: str
    eos: str
    adds_bos: bool = False
    adds_eos: bool = False
    protected: tuple[str, ...] = ()

    def without_added(self, text: str) -> str:
        """The text without the tokens that the tokenizer will add."""
        if self.adds_bos:
            text = text.removeprefix(self.bos)
        return text.removesuffix(self.eos) if self.adds_eos else text


class ChatTemplate:
    """A model's template, compiled and probed once. Without limits: foreign templates belong into a `Renderer`."""

    def __init__(self, source: str | TemplateSource, tokens: SpecialTokens) -> None:
        """ModelError if the template cannot be compiled."""
        given = source if isinstance(source, TemplateSource) else TemplateSource(source)
        self.notes: tuple[str, ...] = ()
        self._default = self._tool_use = _ProbedTemplate(given.default, tokens)
        if given.tool_use not in {None, given.default}:
            try:
                self._tool_use = _ProbedTemplate(given.tool_use or "", tokens)
            except ModelError as error:
                self.notes = (f"{error.message}; the default template is used for conversations with tools, too",)
        self.shows_tools = self._tool_use.shows_tools
        if not self.shows_tools:
            self.notes += ("the model's chat template does not support tools; the model will not see them",)

    def render(self, chat: Chat, *, now: datetime | None = None) -> RenderedPrompt:
        """The prompt, up to where the answer begins. RequestRefused if the template rejects the conversation."""
        template = self._tool_use if chat.tools else self._default
        try:
            prompt = template.prompt(chat, now or datetime.now())
        except TemplateRefusal as error:
            message = f"the model's chat template refused the conversation: {error}"
            hint = "change the messages as it asks"
            raise RequestRefused(message, hint=hint, code="chat_template_refused") from None
        except TemplateError as error:
            message = f"the model's chat template failed on this conversation: {error}"
            hint = "try it without tools or a system message, or send the prompt as text"
            raise RequestRefused(message, hint=hint, code="chat_template_failed") from None
        try:
            prompt.text.encode()
        except UnicodeEncodeError:
            where = unreadable(chat.messages) or "the conversation"
            hint = "send valid Unicode; a surrogate without its pair is not"
            raise RequestRefused(f"{where} contains text that is not Unicode", hint=hint) from None
        return prompt


class _ProbedTemplate:
    """One compiled template, its capabilities and its reasoning marks."""

    def __init__(self, source: str, tokens: SpecialTokens) -> None:
        if source == "chatml":
            source = CHATML
        if "<|channel|>" in source or "[TOOL_CALLS]" in source:
            for check in _NEEDLESS:
                source = source.replace(check, "{%- if false %}")
        self._source = source
        self._tokens = tokens
        self._specials = SpecialTexts(tokens.protected)
        self._sandbox = Sandbox()
        try:
            self._compiled = self._sandbox.compiled(source)
        except TemplateError as error:
            message = f"the model's chat template cannot be used: {error}"
            raise ModelError(message, hint="use a newer file of the model, or send prompts as text") from None
        self.can = capabilities(self._probe)
        self.shows_tools = shows_tools(self._probe)
        self._family: TemplateFamily | None = family_of(source)
        found = Marks() if self._family else marks(self._variant, source, tools=self.can.tool_calls)
        self._marks = found
        self._thinks = self._family.marks_for({}).thinks if self._family else found.thinks

    def prompt(self, chat: Chat, now: datetime) -> RenderedPrompt:
        """The prompt of a conversation."""
        messages = messages_of(chat)
        tools = tools_of(chat)
        arguments = arguments_of(chat)
        mark = self._specials.mark_for(messages, tools, arguments, self._source)
        try:
            return self._specials.unmarked(self._text(messages, tools, arguments, now, mark), mark)
        except TemplateError as error:
            if mark and mark in str(error):
                raise type(error)(str(error).replace(mark, "")) from None
            raise

    def _text(
        self,
        messages: list[ChatMessage],
        tools: list[dict[str, Any]],
        arguments: dict[str, Any],
        now: datetime,
        mark: str,
    ) -> str:
        """The prompt, with the mark in the special tokens of contents."""
        if _TRIMMING in self._source:
            messages = [_trimmed(message) for message in messages]
        prefill = _prefill(messages)
        complete = fitted(messages if prefill is None else messages[:-1], self.can)
        complete = adapted(complete, self.can, developers="<|channel|>" in self._source)
        if self._family:
            complete = self._family.adjust(complete, arguments)
        complete, prefill, tools, arguments = (
            self._specials.marked(each, mark) for each in (complete, prefill, tools, arguments)
        )
        values = self._values(complete, tools, arguments, now)
        if prefill is None:
            return self._with_header(self._run({**values, "add_generation_prompt": True}))
        return self._continued(values, prefill, arguments)

    def _continued(self, values: dict[str, object], prefill: ChatMessage, arguments: dict[str, Any]) -> str:
        """The prompt of a conversation whose last message is the beginning of the answer."""
        again = {name: deepcopy(value) if isinstance(value, list) else value for name, value in values.items()}
        text = self._run(values)  # which may change the lists
        family = self._family
        found = family.marks_for(arguments) if family else self._marks
        if family and family.header is not None:
            header = family.header if text.endswith(family.after) else ""
        else:
            longer = self._run({**again, "add_generation_prompt": True})
            header = longer[common_length(text, longer) :]
            if found.start and not family:
                header = header.partition(found.start)[0]
        if family and family.name == "gpt-oss":  # an earlier answer ended the conversation, this one does not
            text = "<|end|>".join(text.rsplit("<|return|>", 1))
        reasoning = prefill.get("reasoning_content", "")
        answer = joined(prefill["content"], "\n\n")
        if found.start:
            header += "" if family and family.omits_empty_reasoning and not reasoning else found.start
            header += reasoning + ("" if reasoning and not answer else found.end)
        return text + header + answer

    def _with_header(self, text: str) -> str:
        """The prompt with the answer's header, which some templates of one family omit."""
        family = self._family
        return text + (family.header or "") if family and family.after and text.endswith(family.after) else text

    def _values(
        self, messages: list[ChatMessage], tools: list[dict[str, Any]], arguments: dict[str, Any], now: datetime
    ) -> dict[str, object]:
        """The template's variables; later ones win."""
        values: dict[str, object] = {"messages": messages, "bos_token": self._tokens.bos, "eos_token": self._tokens.eos}
        preserve = arguments.get("preserve_reasoning")
        if isinstance(preserve, bool):
            values |= {"preserve_thinking": preserve, "clear_thinking": not preserve}
            values |= {"truncate_history_thinking": not preserve, "drop_thinking": not preserve}
        effort = arguments.get("reasoning_effort")
        if isinstance(effort, str) and effort:
            values["reasoning_strength"] = effort
        if tools:
            values["tools"] = tools
        dates = {"datetime": now.strftime("%b %d %Y"), "date_string": now.strftime("%d %b %Y")}
        return {**values, "strftime_now": now.strftime, "enable_thinking": self._thinks, **dates, **arguments}

    def _run(self, values: dict[str, object], witness: Witness | None = None) -> str:
        return self._tokens.without_added(self._sandbox.render(self._compiled, values, witness))

    def _probe(self, messages: list[ChatMessage], tools: list[dict[str, Any]], witness: Witness) -> str:
        values = {"messages": messages, "tools": tools, "bos_token": "", "eos_token": "", "add_generation_prompt": True}
        return self._run({**values, "strftime_now": _PROBED_ON.strftime}, witness)

    def _variant(
        self, messages: list[ChatMessage], tools: list[dict[str, Any]], headed: bool, thinking: bool
    ) -> str | None:
        """The text of a conversation made up to find the reasoning marks; None if the template fails on it."""
        messages, tools = deepcopy((messages, tools))
        values: dict[str, object] = {
            "messages": fitted(messages, self.can),
            "enable_thinking": thinking,
            "bos_token": self._tokens.bos,
            "eos_token": self._tokens.eos,
            "strftime_now": _PROBED_ON.strftime,
        }
        if headed:
            values["add_generation_prompt"] = True
        if tools:
            values["tools"] = tools
        try:
            return self._run(values)
        except TemplateError:
            return None


def _prefill(messages: list[ChatMessage]) -> ChatMessage | None:
    """The last message, if it is the beginning of the answer."""
    last = messages[-1]
    before = messages[-2:-1]
    if last["role"] != "assistant":
        return None
    place = f"messages[{len(messages) - 1}]"
    if before and before[0]["role"] == "assistant":
        hint = "merge the two, or end with a user message"
        raise RequestRefused(f"{place} is the second assistant message at the end of the conversation", hint=hint)
    if "tool_calls" in last:
        hint = "add the tool's results, each as a message with role tool"
        raise RequestRefused(f"{place} ends the conversation with tool calls, which cannot be continued", hint=hint)
    if not last["content"] and not last.get("reasoning_content"):
        hint = "leave it out to get an answer, or give the answer's beginning"
        raise RequestRefused(f"{place} is an empty assistant message at the end of the conversation", hint=hint)
    return last


def _trimmed(message: ChatMessage) -> ChatMessage:
    content = message["content"]
    if isinstance(content, str):
        content = content.strip()
    else:
        content = [{**part, "text": part["text"].strip()} for part in content]
    changed = {**message, "content": content}
    if "reasoning_content" in changed:
        changed["reasoning_content"] = changed["reasoning_content"].strip()
    return changed
