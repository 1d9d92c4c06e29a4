"""Scores and words of the quality checks, on an engine that answers by rules."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Chat,
    Counters,
    Engine,
    EngineStatus,
    Identity,
    Piece,
    Prompt,
    Request,
    TokenLogprob,
    Usage,
)
from tokenmill.errors import RequestRefused, TooLong
from tokenmill.tuner.qualify.result import USES, WANTED, Check, QualifyStep, verdict
from tokenmill.tuner.qualify.run import ask_all, code, fitting, needles, repeated, room_for, structured
from tokenmill.tuner.qualify.tasks import PLACES, asks, documents

T = TypeVar("T")
CAPABILITIES = Capabilities(
    shares_prefixes=True,
    keeps_prefixes=True,
    chooses_slots=False,
    interactive_first=True,
    pins_prefixes=False,
    saves_prefixes=False,
    changes_threads=False,
    changes_context=False,
    reports_cached_tokens=True,
    grammar=False,
    json_schema=False,
    logit_bias=True,
    tools_parsed=False,
    max_logprobs=20,
)


class Ruled(Engine):
    """Answers by a rule; a token is a word. No real model is correct, damaged or nondeterministic on demand."""

    def __init__(self, rule: Callable[[str], str], *, tokens: bool = True) -> None:
        self._rule, self._tokens = rule, tokens
        self.prompts: list[str] = []
        self.at_once = self.most_at_once = 0

    @property
    def identity(self) -> Identity:
        return Identity("native", "ruled", "m", "rule 1", 4096, 2, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        assert isinstance(request.prompt, Chat)
        assert request.sampling.grammar is None
        assert request.sampling.json_schema is None
        prompt = str(request.prompt.messages[-1]["content"])
        self.prompts.append(prompt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        text = self._rule(prompt)
        logprobs = tuple(TokenLogprob(word, None, -1.0, word.encode()) for word in text.split())
        yield Answer(text, "stop", Usage(len(prompt.split()), len(text.split()), 0), logprobs=logprobs)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        if not self._tokens:
            raise RequestRefused("no tokens")
        return tuple(range(len(str(prompt).split())))

    async def status(self) -> EngineStatus:
        return EngineStatus("ready", self.identity, Counters())

    async def close(self) -> None:
        return


def sound(prompt: str) -> str:
    """What a good model would say."""
    if asked := re.search(r"What is the number of the strongbox of ([A-Za-z ]+)\?", prompt):
        found = re.search(rf"strongbox of {asked[1]} bears the number (\d+)", prompt)
        assert found is not None
        return found[1]
    for task in asks().json.tasks:
        if task.ask == prompt:
            return json.dumps(_filled(task.wanted))
    for written in asks().code.tasks:
        if written.ask == prompt:
            return {
                "Python": 'def f(a):\n    return "x"',
                "JavaScript": 'function f(a) {\n    return g("x");\n}',
            }.get(written.language, 'int f(int a) {\n    return g("x");\n}')
    return f"An answer to: {prompt}"


def damaged(prompt: str) -> str:
    """The same with a quote and a semicolon forgotten here and there."""
    said = sound(prompt)
    return (
        said.replace('x"', "x").replace('", ', ", ", 1)
        if len(prompt) % 2
        else said.replace(";", "").replace("}", "", 1)
    )


def _filled(shape: Any) -> Any:
    if isinstance(shape, dict):
        return {key: _filled(value) for key, value in shape.items()}
    if isinstance(shape, list):
        return [_filled(value) for value in shape]
    return {"string": "x", "integer": 1, "number": 1.5, "boolean": True}[shape]


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


def silent(_: QualifyStep) -> None:
    return


async def every(engine: Ruled, depths: tuple[int, ...] = (512, 1024), *, quick: bool = False) -> list[Check]:
    return [check async for check in ask_all(engine, depths=depths, quick=quick, tell=silent)]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("tokens", [True, False], ids=["tells tokens", "tells none"])
def test_a_sound_model_is_good_for_everything(quick: bool, tokens: bool) -> None:
    checks = run(every(Ruled(sound, tokens=tokens), quick=quick))
    assert {check.name: check.score for check in checks} == {
        "needle": 1.0,
        "json": 1.0,
        "python": 1.0,
        "c-like": 1.0,
        "repeat": 1.0,
    }
    assert all(check.good and not check.failures for check in checks)
    assert verdict(checks).startswith(f"good enough for {USES['needle']}, {USES['json']}")


def test_forgotten_quotes_and_semicolons_are_named() -> None:
    checks = {check.name: check for check in run(every(Ruled(damaged)))}
    assert not checks["c-like"].good
    assert checks["c-like"].figures.keys() & {"semicolons", "quotes"}
    assert re.search("semicolon is missing|quote is not closed", " ".join(f.why for f in checks["c-like"].failures))
    assert not checks["python"].good
    assert not checks["json"].good
    assert f"not good enough for {USES['json']}" in verdict(list(checks.values()))
    assert f"; good enough for {USES['needle']}" in verdict(list(checks.values()))


def test_answers_that_change_when_repeated_fail_and_changes_in_a_batch_are_reported() -> None:
    count = iter(range(1000))
    moody = run(repeated(Ruled(lambda prompt: f"answer {next(count)}"), quick=True, tell=silent))
    assert (moody.score, moody.good) == (0.0, False)
    assert "from character 7" in moody.failures[0].why
    engine = Ruled(lambda prompt: "crowded" if engine.most_at_once > 1 else "alone")
    crowded = run(repeated(engine, quick=True, tell=silent))
    assert crowded.good
    assert crowded.figures == {"changed beside others": 1.0}
    assert "2 of 2 change" in crowded.words


def test_questions_about_a_document_share_it() -> None:
    engine = Ruled(sound)
    found = run(needles(engine, (512, 1024), tell=silent))
    heads = [prompt.rpartition("\n\n")[0] for prompt in engine.prompts]
    assert len(heads) == 10
    assert len(set(heads)) == 2
    assert heads[-1].startswith(heads[0])
    assert engine.most_at_once == 1
    assert found.words.startswith("numbers found by depth in tokens: 5 of 5 at ")


def test_a_refused_question_is_a_failure_with_its_reason() -> None:
    def refused(prompt: str) -> str:
        raise TooLong("1,200 tokens do not fit", needed_tokens=1200, context_tokens=1024)

    found = run(needles(Ruled(refused), (512,), tell=silent))
    assert (found.score, found.asked) == (0.0, 5)
    assert found.failures[0].why == "refused: 1,200 tokens do not fit"


def test_other_tasks_use_all_slots() -> None:
    engine = Ruled(sound)
    run(structured(engine, quick=False, tell=silent))
    assert engine.most_at_once == 2


def test_progress_reaches_its_end() -> None:
    steps: list[QualifyStep] = []
    run(code(Ruled(sound), "c-like", quick=False, tell=steps.append))
    assert [(step.done, step.total) for step in steps] == [(number, 8) for number in range(1, 9)]


@pytest.mark.parametrize("depths", [(256,), (512, 1024), (1024, 4096, 16384), (300, 301)])
@pytest.mark.parametrize("chars", [2.0, 4.3])
def test_documents_hold_their_needles_where_they_should(depths: tuple[int, ...], chars: float) -> None:
    made = documents(depths, chars)
    numbers = [needle.number for document in made for needle in document.needles]
    questions = [needle.question for document in made for needle in document.needles]
    assert len(set(questions)) == len(numbers) == len(depths) * len(PLACES)
    for document in made:
        size = len(document.text)
        assert document.tokens * chars <= size <= document.tokens * chars + 1600
        for needle in document.needles:
            at = document.text.index(f"the number {needle.number}")
            assert at == pytest.approx(needle.share * document.tokens * chars, abs=1200)
    for shallow, deep in pairwise(made):
        assert deep.text.startswith(shallow.text)


def test_a_chronicle_is_the_same_every_time_and_does_not_repeat_itself() -> None:
    (once,), (again,) = documents((4096,), 4.3), documents((4096,), 4.3)
    assert once == again
    pages = once.text.splitlines()
    assert len(set(pages)) == len(pages)


@pytest.mark.parametrize("depth", [256, 1000, 1024, 4096, 16384, 131072])
def test_context_for_a_depth(depth: int) -> None:
    assert fitting((depth,), room_for(depth)) == (depth,)
    assert room_for(depth) <= depth * 1.08 + 512


@pytest.mark.parametrize(
    ("depths", "context", "kept"),
    [
        ((1024, 4096, 16384), None, (1024, 4096, 16384)),
        ((1024, 4096, 16384), 32768, (1024, 4096, 16384)),
        ((1024, 4096, 16384), 8192, (1024, 4096, 7520)),
        ((1024, 4096, 16384), 5000, (1024, 4096)),
        ((4096,), 2048, (1760,)),
        ((1024,), 300, ()),
    ],
)
def test_depths_that_a_context_holds(depths: tuple[int, ...], context: int | None, kept: tuple[int, ...]) -> None:
    assert fitting(depths, context) == kept


def test_everything_asked_is_well_formed() -> None:
    found = asks()
    assert WANTED.keys() == {"needle", "json", "python", "c-like", "repeat", "agreement"}
    assert all(isinstance(task.wanted, dict) for task in found.json.tasks)
    assert {task.language for task in found.code.tasks} == {"Python", "C", "Java", "JavaScript"}
    assert all(len(passage.text.split()) > 60 for passage in found.texts)
