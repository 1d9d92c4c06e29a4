"""Reasoning that the chat template opens, and marks that are control tokens, in answers of the real engine."""

from dataclasses import replace
from pathlib import Path

from support.native_engine import GREEDY, native, plan_for, run
from support.odd_models import SPECIAL, windowed
from tokenmill.engine import tool_calls
from tokenmill.engine.answer_parts import AnswerReader
from tokenmill.engine.engine import Answer, Chat, Piece, Request, answer
from tokenmill.engine.output_parser import ReasoningPart
from tokenmill.native.client import NativeEngine

TEMPLATE = (  # as Qwen3's: without thinking, it writes an empty thought
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
MESSAGES = ({"role": "user", "content": "How?"},)
ASKED = Request(Chat(MESSAGES, template_arguments={"enable_thinking": True}), GREEDY, max_tokens=6, ignore_eos=True)


async def parts(engine: NativeEngine, request: Request) -> tuple[list[object], Answer]:
    """The parts of a streamed answer, and the whole answer as a batch parses it."""
    use = tool_calls.adapt(request, engine.capabilities)
    reader = AnswerReader(use.reader())
    found: list[object] = []
    async for event in engine.stream(use.request):
        if isinstance(event, Piece):
            found += reader.piece(event)
        else:
            found += reader.end(event)[0]
            whole = use.parse(event)
    return found, whole


def test_reasoning_that_the_template_opened_is_separated(tmp_path: Path) -> None:
    model = windowed(tmp_path / "model.gguf", template=TEMPLATE)

    async def work() -> None:
        async with native(model, tmp_path, plan=plan_for(model, context=256, sequences=1)) as engine:
            found, whole = await parts(engine, ASKED)
            assert found
            assert all(isinstance(part, ReasoningPart) for part in found)
            assert whole.message is not None
            assert whole.message["content"] == ""
            assert whole.message["reasoning_content"]
            silent = replace(ASKED, prompt=Chat(MESSAGES, template_arguments={"enable_thinking": False}))
            found, whole = await parts(engine, silent)
            assert not any(isinstance(part, ReasoningPart) for part in found)
            assert whole.message is None
            schema = replace(ASKED, sampling=replace(GREEDY, json_schema="{}"), max_tokens=40, ignore_eos=False)
            assert "<think>" not in (await answer(engine, schema)).text

    run(work)


def test_marks_of_the_output_are_printed_in_chats_only(tmp_path: Path) -> None:
    model = windowed(tmp_path / "model.gguf", template=TEMPLATE)
    sampling = replace(GREEDY, logit_bias=((SPECIAL["<|sep|>"], 1000.0),))

    async def work() -> None:
        async with native(model, tmp_path, plan=plan_for(model, context=256, sequences=1)) as engine:
            chat = await answer(engine, replace(ASKED, sampling=sampling))
            assert chat.text == "<think>" + 6 * "<|sep|>"
            assert (await answer(engine, replace(ASKED, prompt="How?", sampling=sampling))).text == ""

    run(work)
