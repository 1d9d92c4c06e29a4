"""Slots with KV cells of their own: the same results and memory as with a unified cache, switching, and unsupported
models.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.native import Work, loaded, opened
from support.native_engine import GREEDY, chat, interactive, native, plan_for, run
from support.odd_models import recurrent, windowed
from tokenmill.engine.engine import Counters, Request, answer
from tokenmill.errors import EngineError, TooLong, UsageError
from tokenmill.jobs.scheduler.prefix_groups import common_length
from tokenmill.model.synthetic import generate
from tokenmill.native.client import NativeEngine
from tokenmill.native.kv.streams import apart
from tokenmill.native.llama.context import Decoded, LlamaContext, Logits
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings

LANES = 4
TOGETHER = ContextSettings(cells=4 * 512, context=500, sequences=20, batch=256, ubatch=128, threads=1, threads_batch=1)
CLOSE = 0.1  # of the largest logit: a quantized model rounds by the size of its batches


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    generate.write(
        "moe", generate.sizes("moe", {"layers": 2, "embed": 128, "vocab": 608, "heads": 4, "head_dim": 32}), path
    )
    return path


@pytest.fixture(scope="module")
def model(moe_path: Path) -> Iterator[LlamaModel]:
    with loaded(moe_path) as made:
        yield made


@pytest.fixture
def pair(model: LlamaModel) -> Iterator[tuple[LlamaContext, LlamaContext]]:
    made = LlamaContext(model, TOGETHER), LlamaContext(model, apart(TOGETHER, LANES))
    yield made
    for context in made:
        context.close()


def words(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 600, count).tolist()
    return found


def computed(context: LlamaContext, rows: Sequence[Work]) -> list[Logits]:
    """Logits of the last token of every row."""
    assert context.decode(rows) is Decoded.OK
    ends = np.cumsum([len(row.tokens) for row in rows]) - 1
    return [context.logits(int(end)).copy() for end in ends]


# ---- contexts


def test_streams_compute_what_one_cache_computes(pair: tuple[LlamaContext, LlamaContext]) -> None:
    """Prefill prompts of all lengths together, then decode next to a new prompt, then with a slot missing between them."""
    steps = [
        [Work(0, words(40, 1), 0), Work(1, words(55, 2), 0), Work(3, words(60, 3), 0)],
        [Work(0, [7], 40), Work(1, [8], 55), Work(2, words(31, 4), 0), Work(3, [9], 60)],
        [Work(0, [10], 41), Work(2, [11], 31), Work(3, words(200, 5), 61)],
    ]
    for rows in steps:
        for one, other in zip(*(computed(context, rows) for context in pair), strict=True):
            assert np.abs(one - other).max() < CLOSE * np.abs(one).max()
    assert [pair[1].length(lane) for lane in range(LANES)] == [42, 56, 32, 261]


def test_a_stream_begins_with_a_copy_of_anothers_prefix(pair: tuple[LlamaContext, LlamaContext]) -> None:
    """Though both have gone on since, and the one that is copied to held something else."""
    together, streams = pair
    head, tail = words(50, 1), words(20, 2)
    for context in pair:
        computed(context, [Work(0, [*head, *words(30, 3)], 0), Work(2, words(90, 4), 0)])
    streams.copy(0, 2, 50)
    together.cut(2, 0)
    together.copy(0, 2, 50)
    for rows in ([Work(2, tail, 50)], [Work(0, [5], 80), Work(2, [6], 70)], [Work(0, [7], 81), Work(2, [8], 71)]):
        for one, other in zip(*(computed(context, rows) for context in pair), strict=True):
            assert np.abs(one - other).max() < CLOSE * np.abs(one).max()
    assert [streams.length(lane) for lane in range(LANES)] == [82, 0, 72, 0]


def test_streams_take_no_more_memory(pair: tuple[LlamaContext, LlamaContext]) -> None:
    together, streams = ([(each.context_bytes, each.compute_bytes) for each in made.buffers()] for made in pair)
    assert sum(cells for cells, _ in together) == sum(cells for cells, _ in streams) > 0
    assert sum(compute for _, compute in streams) <= sum(compute for _, compute in together)
    assert pair[1].cells == TOGETHER.cells


def test_a_slot_is_full_when_its_own_cells_are(pair: tuple[LlamaContext, LlamaContext]) -> None:
    streams = pair[1]
    for start in range(0, 512, 128):
        computed(streams, [Work(1, words(128, start), start)])
    assert streams.decode([Work(1, [5], 512)]) is Decoded.NO_ROOM
    computed(streams, [Work(0, [5], 0)])
    assert streams.cut(1, 0)
    computed(streams, [Work(1, words(9, 1), 0)])


@pytest.mark.parametrize(("make", "why"), [(windowed, "see 32 tokens only"), (recurrent, "a recurrent state")])
def test_models_with_another_memory_cannot(make: object, why: str, tmp_path: Path) -> None:
    assert callable(make)
    path = make(tmp_path / "odd.gguf")
    with loaded(path) as odd, pytest.raises(EngineError, match=why):
        LlamaContext(odd, apart(TOGETHER, LANES))
    with opened(path, TOGETHER) as context:
        computed(context, [Work(0, [3, 4, 5], 0)])


# ---- engines


def unlike(count: int, *, tokens: int = 12) -> list[Request]:
    topics = ("mills", "rivers", "bread", "moons", "clocks", "salt", "towers", "snow", "harbours", "glass")
    return [chat(f"{topics[at]}: what are they?", system=f"{topics[at]} again", tokens=tokens) for at in range(count)]


async def answered(engine: NativeEngine, requests: Sequence[Request]) -> list[str]:
    return [each.text for each in await asyncio.gather(*(answer(engine, request) for request in requests))]


def alike(some: Sequence[str], others: Sequence[str]) -> bool:
    """Equal except for one answer: batches depend on timing, and rounding decides a near tie."""
    return sum(one == other for one, other in zip(some, others, strict=True)) >= len(some) - 1


async def computed_tokens(engine: NativeEngine, requests: Sequence[Request]) -> int:
    return sum([len(await engine.tokenize(request.prompt)) for request in requests])


async def fresh(engine: NativeEngine) -> Counters:
    """Counters of a pulse that came after everything so far."""
    before = engine.heartbeat
    while engine.heartbeat is before:
        await asyncio.sleep(0.01)
    return (await engine.status()).counters


def test_there_and_back_again(smollm2_path: Path, tmp_path: Path) -> None:
    """Greedy answers are equal except for rounding, nothing is shared, and afterwards prefixes are shared again."""

    async def work() -> None:
        plan = plan_for(smollm2_path, context=512, sequences=3)
        async with native(smollm2_path, tmp_path, plan=plan) as engine:
            requests = unlike(4, tokens=6)
            before = engine.hello
            together = await answered(engine, requests)
            await engine.set_kv_layout("per_slot")
            hello = engine.hello
            assert hello.streams
            assert (engine.identity.slots, engine.capabilities.max_slots, engine.identity.context) == (3, 3, 512)
            assert not engine.capabilities.shares_prefixes
            assert not engine.capabilities.pins_prefixes
            assert any(
                "slots copy prefixes from each other, and retain only their last prompt: every slot has" in note
                for note in engine.capabilities.notes
            )
            cells = [sum(each.context_bytes for each in said.buffers) for said in (before, hello)]
            assert cells[1] <= cells[0]
            began = await fresh(engine)
            assert alike(await answered(engine, requests), together)
            ended = await fresh(engine)
            assert ended.cells_used == 0
            assert ended.cells_total == 3 * 512
            assert began.prompt_tokens_computed is not None
            assert ended.prompt_tokens_computed is not None
            spent = ended.prompt_tokens_computed - began.prompt_tokens_computed
            begins = common_length(*[await engine.tokenize(each.prompt) for each in requests[:2]])
            assert spent == await computed_tokens(engine, requests) - begins * (len(requests) - 3)  # once per slot
            await engine.set_kv_layout("unified")
            back = engine.hello
            assert (back.capabilities, back.streams) == (before.capabilities, False)
            assert alike(await answered(engine, requests), together)
            assert (await answer(engine, requests[0])).usage.cached_tokens

    run(work)


def test_refusals_change_nothing(moe_path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with native(moe_path, tmp_path, plan=plan_for(moe_path, context=512, sequences=2)) as engine:
            with pytest.raises(UsageError, match="3 slots .* 512 cells") as refused:
                await engine.set_context(streams=True, lanes=3)
            assert refused.value.hint == "use 2 slots, or a shorter context"
            assert engine.runtime.kv_layout == "unified"
            assert engine.capabilities.shares_prefixes
            await engine.set_context(streams=True)
            with pytest.raises(UsageError, match="3 slots"):
                await engine.set_slots(3)
            with pytest.raises(EngineError, match="prefixes cannot be cached"):
                await engine.pin_prefix("river bread")
            with pytest.raises(EngineError, match="prefixes cannot be cached"):
                await engine.save_prefix("river bread", tmp_path / "some.head")
            with pytest.raises(EngineError, match="prefixes cannot be cached"):
                await engine.restore_prefix(tmp_path / "some.head")
            with pytest.raises(TooLong, match="513 .* 512"):
                await answer(engine, Request(tuple(words(513, 1)), GREEDY, max_tokens=1))
            full = await answer(engine, Request(tuple(words(505, 1)), GREEDY, max_tokens=50, ignore_eos=True))
            assert full.finish_reason == "length"
            assert full.usage.completion_tokens == 7
            await engine.set_context(streams=True, lanes=1)
            assert engine.capabilities.max_slots == 1
            assert len(await answered(engine, unlike(3))) == 3

    run(work)


def test_models_that_cannot_say_why_and_go_on(tmp_path: Path) -> None:
    async def work() -> None:
        path = windowed(tmp_path / "w.gguf")
        async with native(path, tmp_path, plan=plan_for(path, context=256, sequences=2)) as engine:
            with pytest.raises(EngineError, match="KV cache per slot"):
                await engine.set_context(streams=True)
            assert (await answer(engine, Request((3, 4, 5), GREEDY, max_tokens=2))).usage.prompt_tokens == 3

    run(work)


def test_what_runs_goes_on_in_the_other_context(moe_path: Path, tmp_path: Path) -> None:
    """Switch the layout in both directions during answers, with a cancelled request and a waiting interactive one."""

    async def work() -> None:
        async with native(moe_path, tmp_path, plan=plan_for(moe_path, context=512, sequences=2)) as engine:
            requests = [replace(each, ignore_eos=True) for each in unlike(6, tokens=40)]
            at_work = [asyncio.create_task(answer(engine, each)) for each in requests]
            left = engine.stream(replace(requests[0], max_tokens=400))
            await anext(left)
            await engine.set_context(streams=True)
            await anext(left)
            chatted = await answer(engine, interactive(replace(requests[1], max_tokens=5)))
            await left.aclose()
            await engine.set_context(streams=False)
            await engine.set_context(streams=True)
            done = await asyncio.gather(*at_work)
            assert [each.usage.completion_tokens for each in done] == [40] * 6
            assert chatted.usage.completion_tokens == 5
            counters = await fresh(engine)
            assert counters.running == counters.waiting == counters.cells_used == 0

    run(work)


def test_lockstep_gives_the_answers_of_a_unified_cache(smollm2_path: Path, tmp_path: Path) -> None:
    """Prompts and answers of different lengths, one job that is cancelled and an interactive one in between."""

    async def work() -> None:
        plan = plan_for(smollm2_path, context=256, sequences=5)
        async with native(smollm2_path, tmp_path, plan=plan) as engine:
            requests = [
                chat("Count. " + "one two three four five " * (at % 4), system="Be brief.", tokens=3 + 5 * (at % 3))
                for at in range(14)
            ]
            unified = await answered(engine, requests)
            await engine.set_context(streams=True, lockstep=True)
            began = await fresh(engine)
            tasks = [asyncio.create_task(answer(engine, each)) for each in requests]
            cancelled = engine.stream(replace(requests[1], max_tokens=200, ignore_eos=True))
            await anext(cancelled)
            chatted = await answer(engine, interactive(replace(requests[2], max_tokens=4)))
            await cancelled.aclose()
            assert alike([(await task).text for task in tasks], unified)
            assert chatted.usage.completion_tokens <= 4
            ended = await fresh(engine)
            assert (ended.running, ended.waiting, ended.cells_used) == (0, 0, 0)
            assert ended.prompt_tokens_computed is not None
            assert began.prompt_tokens_computed is not None
            spent = ended.prompt_tokens_computed - began.prompt_tokens_computed
            assert spent < await computed_tokens(engine, requests)  # the common beginning is copied

    run(work)
