"""A stored batch as a workload: what is read for the decision about slots and KV layout, and what is not."""

import asyncio
from pathlib import Path

from support.jobs_store import submitted
from support.slot_engines import LayoutEngine, RatedEngine
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.workload import ASSUMED_OUTPUT_TOKENS, SAMPLE, describe, prefix_sharing
from tokenmill.tuner.slots import Workload

WORDS = [f"{start}{end}" for start in ("ri", "bre", "mo", "whee") for end in ("ver", "ad", "on", "l")]


def described(engine: RatedEngine, folder: Path, jobs: int, max_tokens: int, *, measure: bool = True) -> Workload:
    with Store(folder / "store") as store:
        prompts = [f"prompt {number}" for number in range(jobs)]
        batch = submitted(store, folder / "jobs.jsonl", prompts, max_tokens=max_tokens)
        return asyncio.run(describe(engine, store, batch, measure=measure, adapt_layout=True))


def test_a_long_batch_gives_its_own_prompts(tmp_path: Path) -> None:
    workload = described(RatedEngine({}, max_slots=2), tmp_path, 50, 1000)
    prompts = {request.prompt for request in workload.requests}
    assert len(prompts) == 4  # two for each slot: the engine may refuse some
    assert prompts <= {f"prompt {number}" for number in range(50)}
    assert {request.priority for request in workload.requests} == {"batch"}
    assert (workload.pending_jobs, workload.output_tokens) == (50, 50_000)


def test_a_short_batch_gives_none(tmp_path: Path) -> None:
    assert described(RatedEngine({}, max_slots=2), tmp_path, 10, 16).requests == ()


def test_a_batch_that_must_not_be_measured_gives_none(tmp_path: Path) -> None:
    assert described(RatedEngine({}, max_slots=2), tmp_path, 50, 1000, measure=False) == Workload(50)


def test_jobs_without_max_tokens_are_assumed_to_be_short(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["one", "two"])
        workload = asyncio.run(describe(RatedEngine({}), store, batch, measure=True, adapt_layout=False))
    assert workload.output_tokens == 2 * ASSUMED_OUTPUT_TOKENS


def test_prompts_are_tokenized_only_if_the_layout_may_change(tmp_path: Path) -> None:
    engine, fixed = LayoutEngine(), LayoutEngine(changes_kv_layout=False)
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["one", "two"])
        kept = asyncio.run(describe(engine, store, batch, measure=True, adapt_layout=False))
        not_possible = asyncio.run(describe(fixed, store, batch, measure=True, adapt_layout=True))
        assert (engine.tokenized, fixed.tokenized) == (0, 0)
        changed = asyncio.run(describe(engine, store, batch, measure=True, adapt_layout=True))
    assert kept.sharing is None
    assert not_possible.sharing is None
    assert changed.sharing is not None
    assert engine.tokenized == 2


def test_pairs_among_many_are_seen_although_few_are_compared(tmp_path: Path) -> None:
    """Each prefix has two jobs, and the sample is far too coarse to contain both."""
    prompts = [
        f"{' '.join(f'{word}{number // 2}' for word in WORDS * 6)} tail{number}" for number in range(20 * SAMPLE)
    ]
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts)
        found = asyncio.run(prefix_sharing(LayoutEngine(), store, batch))
    assert found is not None
    assert 0.25 < found.shared_tokens / found.prompt_tokens <= 0.5  # half, less what a chunk cuts off
