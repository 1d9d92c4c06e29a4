"""Prefixes shared in the native engine by models with a recurrent state, which is kept where their prompts branch."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.hybrid_models import delta_net, kda, mamba
from support.native import Work, opened
from support.native_engine import GREEDY, native, plan_for, run
from support.odd_models import VOCAB, recurrent
from tokenmill.engine.engine import Answer, Chat, Request, answer
from tokenmill.native.client import NativeEngine
from tokenmill.native.llama.settings import ContextSettings

ALONE = ContextSettings(cells=512, context=512, sequences=1, batch=512, ubatch=512, threads=1, threads_batch=1)
ANSWER = 12
MODELS: tuple[Callable[[Path], Path], ...] = (delta_net, mamba, kda, recurrent)
each_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def words(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, count).tolist())


DIGEST = words(120, 1)
DOCUMENTS = [(*DIGEST, *words(40, 10 + number)) for number in range(3)]
PROMPTS = [(*document, *words(9, 100 * row + number)) for row, document in enumerate(DOCUMENTS) for number in range(4)]
MINIMUM = 120 + 3 * 40 + 12 * 9


def greedy(model: Path, prompts: list[tuple[int, ...]], count: int = ANSWER) -> list[list[int]]:
    """Answers that are computed one by one, from nothing."""
    answers = []
    planned = plan_for(model, context=512).settings
    alone = replace(ALONE, cache_type_k=planned.cache_type_k, cache_type_v=planned.cache_type_v)
    with opened(model, alone) as context:
        for prompt in prompts:
            context.clear()
            context.decode([Work(0, prompt, 0)])
            row, tokens = len(prompt) - 1, list[int]()
            while len(tokens) < count:
                tokens.append(int(context.logits(row).argmax()))
                context.decode([Work(0, tokens[-1:], len(prompt) + len(tokens) - 1)])
                row = 0
            answers.append(tokens)
    return answers


def request(prompt: tuple[int, ...], later: tuple[tuple[int, ...], ...] = ()) -> Request:
    sampling = replace(GREEDY, top_logprobs=0)
    return Request(prompt, sampling, max_tokens=ANSWER, ignore_eos=True, later=later)


def requests() -> list[Request]:
    """All prompts, each with the next one and one of the next document, as a batch sends them."""
    return [
        request(prompt, (*PROMPTS[number + 1 : number + 2], *PROMPTS[number // 4 * 4 + 4 :][:1]))
        for number, prompt in enumerate(PROMPTS)
    ]


def tokens(found: Answer) -> list[int]:
    assert found.logprobs is not None
    return [each.token for each in found.logprobs if each.token is not None]


async def computed(engine: NativeEngine) -> int:
    """Prompt tokens computed so far, from a heartbeat that is newer than this call."""
    before = engine.heartbeat
    while engine.heartbeat is before:
        await asyncio.sleep(0.01)
    return engine.heartbeat.counters.prompt_tokens_computed or 0


@each_model
def test_a_batch_computes_every_prefix_once_and_answers_as_without_sharing(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    model = make(tmp_path / "model.gguf")
    wanted = greedy(model, PROMPTS)

    async def work() -> None:
        async with native(model, tmp_path, plan=plan_for(model, context=512, sequences=2)) as engine:
            assert engine.capabilities.shares_prefixes
            assert engine.capabilities.needs_branches
            answers = await asyncio.gather(*(answer(engine, each) for each in requests()))
            assert [tokens(each) for each in answers] == wanted
            assert await computed(engine) == MINIMUM

    run(work)


def test_later_prompts_that_are_not_queued_yet_find_the_state_where_they_diverge(tmp_path: Path) -> None:
    model = delta_net(tmp_path / "model.gguf")
    wanted = greedy(model, PROMPTS)

    async def work() -> None:
        async with native(model, tmp_path, plan=plan_for(model, context=512, sequences=2)) as engine:
            answers = [await answer(engine, each) for each in requests()]
            assert [tokens(each) for each in answers] == wanted
            assert await computed(engine) == MINIMUM

    run(work)


@each_model
def test_a_pinned_prefix_is_saved_restored_and_shared(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model, file = make(tmp_path / "model.gguf"), tmp_path / "digest.head"
    prompts = PROMPTS[::4]

    async def write() -> None:
        async with native(model, tmp_path, plan=plan_for(model, context=512, sequences=2)) as engine:
            assert (await engine.pin_prefix(DIGEST)).cached_tokens == 0
            assert (await engine.pin_prefix(DIGEST)).cached_tokens == len(DIGEST)
            assert await engine.save_prefix(DIGEST, file) == len(DIGEST)

    async def read() -> list[list[int]]:
        async with native(model, tmp_path, plan=plan_for(model, context=512, sequences=2)) as engine:
            assert await engine.restore_prefix(file) == len(DIGEST)
            answers = [await answer(engine, request(prompt)) for prompt in prompts]
            assert {each.usage.cached_tokens for each in answers} == {len(DIGEST)}
            return [tokens(each) for each in answers]

    run(write)
    assert run(read) == greedy(model, prompts)


@each_model
def test_the_plan_counts_every_state(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = make(tmp_path / "model.gguf")
    plan = plan_for(model, context=512, sequences=2)

    async def work() -> int:
        async with native(model, tmp_path, plan=plan) as engine:
            assert engine.runtime is not None
            return sum(buffer.context_bytes for buffer in engine.runtime.buffers or ())

    assert sum(row.bytes for row in plan.ledger.full_context if row.item == "kv") == run(work)


def test_the_next_turn_of_a_conversation_continues_from_the_last(tmp_path: Path) -> None:
    model = delta_net(tmp_path / "model.gguf")
    first = ({"role": "user", "content": "grind the corn of all the mills in this valley"},)

    async def work() -> None:
        async with native(model, tmp_path, plan=plan_for(model, context=512, sequences=1)) as engine:
            asked = Request(Chat(first), GREEDY, max_tokens=8, priority="interactive")
            said = await answer(engine, asked)
            turns = (*first, {"role": "assistant", "content": "other words"}, {"role": "user", "content": "and then?"})
            again = await answer(engine, replace(asked, prompt=Chat(turns)))
            assert again.usage.cached_tokens is not None
            assert again.usage.cached_tokens >= said.usage.prompt_tokens - 16

    run(work)


def test_a_preempted_sequence_resumes_with_the_same_answer(tmp_path: Path) -> None:
    model = delta_net(tmp_path / "model.gguf")
    long = replace(request(words(200, 5)), priority="interactive")
    prompts = [(*words(150, 7), *words(20, 8 + number)) for number in range(2)]
    wanted = greedy(model, prompts, 80)

    async def work() -> None:
        async with native(model, tmp_path, plan=plan_for(model, context=256, sequences=1)) as engine:
            generating = asyncio.Event()

            async def ask(prompt: tuple[int, ...]) -> list[int]:
                async for event in engine.stream(replace(request(prompt), max_tokens=80)):
                    generating.set()
                    if isinstance(event, Answer):
                        return tokens(event)
                raise AssertionError("no answer")

            batch = [asyncio.create_task(ask(prompt)) for prompt in prompts]
            await generating.wait()
            await answer(engine, long)
            assert [await each for each in batch] == wanted
            await computed(engine)
            assert engine.heartbeat.counters.preemptions

    run(work)
