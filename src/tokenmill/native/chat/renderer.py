"""Renders a model's chat template in a child process with limits of memory and processor time.

A model file may come from anyone, and its template is a program: it can loop forever, build gigabytes of text, or
spend minutes in one C call that Python cannot interrupt. Templates are therefore compiled, probed and rendered only in
the child (limited_process.py). If a template exceeds a limit, the child is killed, the request fails with
`chat_template_stopped`, and the next request starts another child; during the load of a model, it is a ModelError.

    python -m tokenmill.native.chat.renderer        the child: reads the template, then one conversation per line
"""

import threading
from dataclasses import asdict
from datetime import datetime
from typing import Any

from tokenmill.engine.engine import Chat
from tokenmill.errors import EngineError, ModelError, RequestRefused, TokenmillError, from_wire, to_wire
from tokenmill.native.chat.special_tokens import RenderedPrompt
from tokenmill.native.chat.template import ChatTemplate, SpecialTokens, TemplateSource
from tokenmill.native.limited_process import ChildDied, LimitedProcess, ProcessLimits, serve
from tokenmill.units import MIB

LIMITS = ProcessLimits(memory_bytes=512 * MIB, cpu_s=4, wall_s=30.0)
MOST_CHARACTERS = 8 << 20  # of one prompt


class Renderer:
    """A model's template in a child process; may be used by several threads."""

    def __init__(self, limits: ProcessLimits = LIMITS) -> None:
        """Start the child, which takes a third of a second; `open` sends the template."""
        self._limits = limits
        self._lock = threading.Lock()
        self._process = LimitedProcess(__name__)
        self._process.start()
        self._template: dict[str, Any] = {}
        self.notes: tuple[str, ...] = ()
        self.shows_tools = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None if none is running."""
        return self._process.pid

    def open(self, source: TemplateSource, tokens: SpecialTokens) -> None:
        """Compile and probe the template. ModelError if it cannot be used."""
        self._template = {
            "source": asdict(source),
            "tokens": asdict(tokens),
        }
        try:
            about = self._send_template()
        except ChildDied as error:
            message = f"the model's chat template cannot be used: {error}"
            raise ModelError(message, hint="use a newer file of the model") from None
        self.notes = tuple(about["notes"])
        self.shows_tools = about["shows_tools"]

    def render(self, chat: Chat, *, now: datetime | None = None) -> RenderedPrompt:
        """The prompt, as `ChatTemplate.render` returns it; RequestRefused also if the template exceeds a limit."""
        question = {
            "messages": chat.messages,
            "tools": chat.tools,
            "tool_choice": chat.tool_choice,
            "arguments": chat.template_arguments,
            "now": None if now is None else now.isoformat(),
        }
        try:
            with self._lock:
                if self._process.pid is None:
                    self._process.start()
                    self._send_template()
                reply = _checked(self._process.ask(question, self._limits))
                return RenderedPrompt(reply["text"], tuple(reply["breaks"]))
        except ChildDied as error:
            if error.killed:
                raise EngineError(f"the chat template's process died: {error}", hint="retry the request") from None
            raise _stopped(str(error)) from None

    def close(self) -> None:
        """End the child."""
        self._process.close()

    def _send_template(self) -> dict[str, Any]:
        return _checked(self._process.ask(self._template, self._limits))


def _stopped(why: str) -> RequestRefused:
    hint = "shorten the conversation; if it is short, the template is broken"
    return RequestRefused(f"the model's chat template was stopped: {why}", hint=hint, code="chat_template_stopped")


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        raise from_wire(reply["error"])
    return reply


class _Child:
    """The child's state: the template, None until it is received."""

    def __init__(self) -> None:
        self._template: ChatTemplate | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._template is None:
                self._template = ChatTemplate(TemplateSource(**question["source"]), SpecialTokens(**question["tokens"]))
                return {"notes": self._template.notes, "shows_tools": self._template.shows_tools}
            chat = Chat(
                tuple(question["messages"]), tuple(question["tools"]), question["tool_choice"], question["arguments"]
            )
            now = None if question["now"] is None else datetime.fromisoformat(question["now"])
            prompt = self._template.render(chat, now=now)
        except TokenmillError as error:
            return {"error": to_wire(error)}
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            return {"error": to_wire(RequestRefused(f"the conversation is malformed: {type(error).__name__}: {error}"))}
        if len(prompt.text) > MOST_CHARACTERS:
            return {"error": to_wire(_stopped(f"it wrote more than {MOST_CHARACTERS} characters"))}
        return prompt._asdict()


if __name__ == "__main__":
    serve(_Child().answer)
