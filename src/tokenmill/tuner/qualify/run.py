"""Runs the quality checks of a quantization: sends the tasks to an engine and judges the answers.

Each check has a score, a threshold and examples of failures. The tasks are in tasks.toml, the judges in judge.py. The
caller starts the engine.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from tokenmill.engine.engine import Answer, Chat, Engine, Request, Sampling, answer
from tokenmill.errors import RequestRefused
from tokenmill.tuner.qualify.judge import code_in, has_number, is_code, is_json, spoken
from tokenmill.tuner.qualify.result import Check, CheckName, QualifyStep, Tell, WrongAnswer, check
from tokenmill.tuner.qualify.tasks import PLACES, SearchPage, asks, documents, paragraph

DEPTHS = (1024, 4096, 16384)
QUICK_DEPTHS = (1024,)
QUICK_PLACES = (0.05, 0.5, 0.95)
POSITIONS, QUICK_POSITIONS = 160, 48  # positions per text, compared with a reference
QUICK_TEXTS = 3
RESERVED_TOKENS = 160  # for the question, the template and the answer
_NUMBER_TOKENS = 48
_JSON_TOKENS = 256
_CODE_TOKENS = 400
_AGAIN_TOKENS = 48
_ROUNDS = 3
_EXCERPT = 160  # characters
_CHARS_PER_TOKEN = 4.2  # assumed for an engine that cannot tokenize
_SAMPLE = 12  # paragraphs for measuring characters per token


@dataclass(frozen=True, slots=True)
class AskedTask:
    """A request and the judge of its answer."""

    label: str
    request: Request
    judge: Callable[[str], str | None]  # returns None if correct, else the fault
    shown: Callable[[str], str] = spoken


async def ask_all(engine: Engine, *, depths: Sequence[int], quick: bool, tell: Tell) -> AsyncIterator[Check]:
    """Run the checks that need no reference."""
    if depths:
        yield await needles(engine, depths, places=QUICK_PLACES if quick else PLACES, tell=tell)
    yield await structured(engine, quick=quick, tell=tell)
    for name in ("python", "c-like"):
        yield await code(engine, "python" if name == "python" else "c-like", quick=quick, tell=tell)
    yield await repeated(engine, quick=quick, tell=tell)


async def needles(engine: Engine, depths: Sequence[int], *, places: Sequence[float] = PLACES, tell: Tell) -> Check:
    """Find numbers hidden in a chronicle, at several depths and places."""
    made = documents(depths, await _chars_per_token(engine), places)
    total = len(depths) * len(places)
    failures: list[WrongAnswer] = []
    right: dict[int, int] = {}
    done = 0
    for document in made:
        found = []
        for asked in _about(engine, document):
            # one after the other, because the first question computes the document for the others
            found.append(await _asked(engine, asked))
            done += 1
            tell(QualifyStep("needle", done, total))
        wrong = [failure for _, failure in found if failure is not None]
        depth = max((answered.usage.prompt_tokens for answered, _ in found if answered is not None), default=0)
        right[depth or document.tokens] = len(found) - len(wrong)
        failures += wrong
    shown = ", ".join(f"{count} of {len(places)} at {depth:,}" for depth, count in right.items())
    figures = {f"at {depth}": count / len(places) for depth, count in right.items()}
    return check("needle", total, failures, f"numbers found by depth in tokens: {shown}", figures)


async def structured(engine: Engine, *, quick: bool, tell: Tell) -> Check:
    """Ask for JSON of a given shape, without a grammar."""
    tasks = asks().json.tasks[:: 2 if quick else 1]
    requests = [
        AskedTask(task.ask, _chat(engine, task.ask, asks().json.system, _JSON_TOKENS), _json_judge(task.wanted))
        for task in tasks
    ]
    failures = await _together(engine, "json", requests, tell)
    right = len(tasks) - len(failures)
    parsed = right + sum("parse" not in failure.why and "has no JSON" not in failure.why for failure in failures)
    words = f"{parsed} of {len(tasks)} parse, {right} have the requested shape"
    return check("json", len(tasks), failures, words, {"parse": parsed / len(tasks)})


async def code(engine: Engine, name: Literal["python", "c-like"], *, quick: bool, tell: Tell) -> Check:
    """Ask for small functions, which must parse but need not be correct."""
    tasks = [task for task in asks().code.tasks if (task.language == "Python") == (name == "python")]
    tasks = tasks[:: 2 if quick else 1]

    def judge(language: Literal["Python", "C", "Java", "JavaScript"]) -> Callable[[str], str | None]:
        return lambda text: is_code(text, language)

    requests = [
        AskedTask(task.ask, _chat(engine, task.ask, asks().code.system, _CODE_TOKENS), judge(task.language), code_in)
        for task in tasks
    ]
    failures = await _together(engine, name, requests, tell)
    right = len(tasks) - len(failures)
    return check(name, len(tasks), failures, f"{right} of {len(tasks)} parse", _kinds(failures))


def _kinds(failures: Sequence[WrongAnswer]) -> dict[str, float]:
    """Number of answers by first fault: a missing semicolon, quote or bracket."""
    found = {f"{kind}s": sum(kind in failure.why for failure in failures) for kind in ("semicolon", "quote", "bracket")}
    return {kind: float(number) for kind, number in found.items() if number}


async def repeated(engine: Engine, *, quick: bool, tell: Tell) -> Check:
    """Repeat greedy requests: alone, the answer must not change; changes in a batch are only reported."""
    prompts = asks().again.prompts[: 2 if quick else None]
    requests = [_chat(engine, prompt, None, _AGAIN_TOKENS, logprobs=True) for prompt in prompts]
    total = len(prompts) * (_ROUNDS + 2)
    done = 0
    failures = []
    first = []
    for prompt, request in zip(prompts, requests, strict=True):
        # skip the first, which computes the prompt: chunks of another size round differently
        answers = [await answer(engine, request) for _ in range(_ROUNDS + 1)][1:]
        done += _ROUNDS + 1
        tell(QualifyStep("repeat", done, total))
        first.append(answers[0])
        other = next((each for each in answers if _drawn(each) != _drawn(answers[0])), None)
        if other is not None:
            failures.append(WrongAnswer(prompt, _parted(answers[0], other), _excerpt(other.text)))
    together = await asyncio.gather(*(answer(engine, request) for request in requests))
    tell(QualifyStep("repeat", total, total))
    changed = sum(_drawn(one) != _drawn(alone) for one, alone in zip(together, first, strict=True))
    words = f"{len(prompts) - len(failures)} of {len(prompts)} are identical when repeated alone; " + (
        f"{changed} of {len(prompts)} change in a batch, because of rounding" if changed else "none change in a batch"
    )
    return check("repeat", len(prompts), failures, words, {"changed beside others": changed / len(prompts)})


def room_for(depth: int) -> int:
    """The context required for a question at this depth; the inverse of `fitting`."""
    needed = -(-(depth + RESERVED_TOKENS) * 16 // 15)
    return -(-needed // 256) * 256


def fitting(depths: Sequence[int], context: int | None) -> tuple[int, ...]:
    """Depths that fit in the context; a larger one is reduced to it if that is still useful."""
    if context is None:
        return tuple(depths)
    longest = context - RESERVED_TOKENS - context // 16  # a margin, because the number of tokens is only estimated
    kept = [depth for depth in sorted(depths) if depth <= longest]
    over = len(kept) < len(depths)
    if over and longest >= 256 and (not kept or longest >= 1.5 * kept[-1]):
        kept.append(longest)
    return tuple(kept)


def _about(engine: Engine, document: SearchPage) -> list[AskedTask]:
    """The questions about a document, which is their common prefix."""
    found = []
    for needle in document.needles:
        request = _chat(engine, f"{document.text}\n\n{needle.question}", None, _NUMBER_TOKENS)
        if engine.capabilities.chooses_slots:
            request = replace(request, slot=0)  # otherwise every slot computes the document
        label = f"{needle.question} ({needle.share:.0%} into {document.tokens:,} tokens)"
        found.append(AskedTask(label, request, _number_judge(needle.number)))
    return found


def _number_judge(number: str) -> Callable[[str], str | None]:
    return lambda text: has_number(text, number)


def _json_judge(shape: object) -> Callable[[str], str | None]:
    return lambda text: is_json(text, shape)


async def _together(engine: Engine, name: CheckName, requests: Sequence[AskedTask], tell: Tell) -> list[WrongAnswer]:
    """Send all requests, one per slot concurrently; returns the failures in order."""
    slots = asyncio.Semaphore(max(1, engine.identity.slots or 1))
    done = 0

    async def one(asked: AskedTask) -> WrongAnswer | None:
        nonlocal done
        async with slots:
            _, failure = await _asked(engine, asked)
        done += 1
        tell(QualifyStep(name, done, len(requests)))
        return failure

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(asked)) for asked in requests]
    return [failure for task in tasks if (failure := task.result()) is not None]


async def _asked(engine: Engine, asked: AskedTask) -> tuple[Answer | None, WrongAnswer | None]:
    try:
        found = await answer(engine, asked.request)
    except RequestRefused as error:
        return None, WrongAnswer(asked.label, f"refused: {error.message}", "")
    why = asked.judge(found.text)
    if why is None:
        return found, None
    if found.finish_reason == "length":
        why += f" (cut off after {found.usage.completion_tokens} tokens)"
    return found, WrongAnswer(asked.label, why, _excerpt(asked.shown(found.text) or found.text))


def _chat(engine: Engine, ask: str, system: str | None, tokens: int, *, logprobs: bool = False) -> Request:
    messages = [{"role": "user", "content": ask}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system.strip()})
    # disable thinking in templates that support it; OpenAI's protocol has no such option
    quiet = {} if engine.identity.kind == "url" else {"enable_thinking": False}
    sampling = Sampling(temperature=0.0, top_logprobs=0 if logprobs else None)
    return Request(Chat(tuple(messages), template_arguments=quiet), sampling, max_tokens=tokens)


async def _chars_per_token(engine: Engine) -> float:
    text = "\n".join(paragraph(number) for number in range(_SAMPLE))
    with suppress(RequestRefused):
        return len(text) / max(1, len(await engine.tokenize(text)))
    return _CHARS_PER_TOKEN


def _drawn(found: Answer) -> object:
    """The generated tokens, or the text if the engine does not report them."""
    tokens = [each.token if each.token is not None else each.raw for each in found.logprobs or ()]
    return tokens or found.text


def _parted(one: Answer, other: Answer) -> str:
    same = next((at for at, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b), None)
    return f"the answer differs from character {same} on" if same is not None else "the answer differs"


def _excerpt(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"
