"""An engine fitted to a batch in a real store: slots, KV layout, progress, messages and the shape for the worker."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.jobs_store import submitted
from support.slot_engines import LayoutEngine, RatedEngine
from tokenmill.api.engines.slots import fit_slots
from tokenmill.api.progress import Measuring, Progress
from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineDied
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.workload import SLOT_PREFIX_TOKENS
from tokenmill.tuner.point import SlotPoint
from tokenmill.tuner.slots import ROUNDS

WORDS = [f"{start}{end}" for start in ("ri", "bre", "mo", "whee") for end in ("ver", "ad", "on", "l")]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Messages of the library."""
    monkeypatch.setattr(logging.getLogger("tokenmill"), "propagate", True)  # the command line turns it off
    caplog.set_level(logging.INFO, "tokenmill")
    return caplog


def fitted(
    engine: Engine,
    folder: Path,
    prompts: Sequence[str],
    *,
    max_tokens: int = 64,
    adapt_layout: bool = True,
    known: SlotPoint | None = None,
    events: list[Progress] | None = None,
) -> EngineShape:
    folder.mkdir(exist_ok=True)
    with Store(folder / "store") as store:
        batch = submitted(store, folder / "jobs.jsonl", prompts, max_tokens=max_tokens)
        fitting = fit_slots(
            engine,
            store,
            batch,
            measure=True,
            adapt_layout=adapt_layout,
            on_progress=(events if events is not None else []).append,
            known=known,
            label="node-1",
        )
        return asyncio.run(asyncio.wait_for(fitting, 10))


def different(count: int, words: int = 60) -> list[str]:
    return [
        " ".join(f"{WORDS[(number * 7 + at) % len(WORDS)]}{number}" for at in range(words)) for number in range(count)
    ]


def numbered(count: int) -> list[str]:
    return [f"prompt {number}" for number in range(count)]


# ---- slots


def test_a_long_batch_is_measured_with_its_own_prompts(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    engine, events = RatedEngine({1: 50.0, 2: 70.0}, max_slots=2), list[Progress]()
    shape = fitted(engine, tmp_path, numbered(50), max_tokens=1000, events=events)
    assert shape.width == 2
    assert shape.rates.decode_at(1) == pytest.approx(50.0)
    assert shape.rates.decode_at(2) == pytest.approx(70.0)
    prompts = {request.prompt for request in engine.requests}
    assert len(prompts) == 2
    assert prompts <= set(numbered(50))
    assert len(events) == 2 * ROUNDS
    assert all(isinstance(event, Measuring) for event in events)
    assert [message.startswith("node-1: 2 slots: ") for message in messages.messages] == [True]


def test_a_short_batch_is_not_measured(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    engine = RatedEngine({1: 50.0, 2: 70.0}, max_slots=2)
    shape = fitted(engine, tmp_path, numbered(10), max_tokens=16)
    assert (shape.width, shape.rates.decode_tok_s) == (2, ())
    assert engine.set_to == []
    assert messages.messages == []


def test_measured_slots_are_kept_for_the_next_batch(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    engine = RatedEngine({1: 50.0, 2: 50.0}, max_slots=2)
    first = fitted(engine, tmp_path / "first", numbered(50), max_tokens=1000)
    engine.set_to.clear()
    messages.clear()
    second = fitted(engine, tmp_path / "second", numbered(60), max_tokens=1000, known=first.point)
    assert (first.width, second.width) == (1, 1)
    assert second.rates == first.rates
    assert engine.set_to == []
    assert messages.messages == []


def test_a_batch_that_was_too_short_does_not_keep_the_next_one_from_being_measured(tmp_path: Path) -> None:
    engine = RatedEngine({1: 50.0, 2: 50.0}, max_slots=2)
    first = fitted(engine, tmp_path / "first", numbered(10), max_tokens=16)
    second = fitted(engine, tmp_path / "second", numbered(50), max_tokens=1000, known=first.point)
    assert (first.width, second.width) == (2, 1)


def test_an_engine_that_fails_while_it_is_measured_is_used_as_it_is(tmp_path: Path) -> None:
    engine = RatedEngine({1: 50.0}, max_slots=2, fails_at=(2, EngineDied("killed")))
    assert fitted(engine, tmp_path, numbered(50), max_tokens=1000).width == 2


# ---- KV layout


def test_prompts_that_share_nothing_get_cells_per_slot(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    engine = LayoutEngine()
    shape = fitted(engine, tmp_path, different(40))
    assert engine.set_to == ["per_slot"]
    assert shape.point is not None
    assert shape.point.kv_layout == "per_slot"
    assert [message.startswith("node-1: ") for message in messages.messages] == [True]


@pytest.mark.parametrize(
    "prompts",
    [
        [f"{' '.join(WORDS * 5)} {text}" for text in different(40)],  # one prefix
        [f"{' '.join(WORDS * 9)} {number % 4} {text}" for number, text in enumerate(different(40))],  # and longer ones
        [text for text in different(20) for _ in range(2)],  # each prompt twice
        [
            f"{' '.join(f'{word}{number // 2}' for word in WORDS * 6)} {text}"
            for number, text in enumerate(different(40))
        ],
    ],
)
def test_prompts_that_share_prefixes_keep_a_unified_cache(
    prompts: list[str], tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    engine = LayoutEngine()
    fitted(engine, tmp_path, prompts)
    assert engine.set_to == []
    assert messages.messages == []


def test_a_short_prefix_of_a_chat_template_is_no_loss(tmp_path: Path) -> None:
    """Each slot keeps it from its last prompt."""
    short = LayoutEngine(template=tuple(range(SLOT_PREFIX_TOKENS)))
    long = LayoutEngine(template=tuple(range(SLOT_PREFIX_TOKENS + 1)))
    fitted(short, tmp_path / "short", different(40))
    fitted(long, tmp_path / "long", different(40))
    assert (short.kv_layout, long.kv_layout) == ("per_slot", "unified")


def test_an_engine_goes_back_to_a_unified_cache(tmp_path: Path) -> None:
    engine = LayoutEngine(kv_layout="per_slot")
    fitted(engine, tmp_path, [f"{' '.join(WORDS * 5)} {text}" for text in different(40)])
    assert engine.set_to == ["unified"]


def test_an_engine_with_cells_per_slot_keeps_them(tmp_path: Path) -> None:
    engine = LayoutEngine(kv_layout="per_slot")
    fitted(engine, tmp_path, different(40))
    assert engine.set_to == []


def test_a_layout_that_must_not_change_stays(tmp_path: Path) -> None:
    engine = LayoutEngine()
    fitted(engine, tmp_path, different(40), adapt_layout=False)
    assert engine.set_to == []


def test_refused_jobs_are_not_compared(tmp_path: Path) -> None:
    engine = LayoutEngine()
    fitted(engine, tmp_path / "all", ["refused", *(f"refused {text}" for text in different(30))])
    assert engine.set_to == []
    fitted(engine, tmp_path / "one", [*different(30), "refused"])
    assert engine.set_to == ["per_slot"]
