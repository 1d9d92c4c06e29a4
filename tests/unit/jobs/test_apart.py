"""When lanes get cells of their own: the arithmetic, and what an engine is told for a batch in a real store."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from support.fake_engine import CAPABILITIES
from support.jobs_store import submitted
from tokenmill.engine.engine import Answer, Capabilities, Counters, Identity, Piece, Prompt, Request, Status
from tokenmill.errors import EngineError, RequestRefused, TokenmillError, UsageError
from tokenmill.jobs.apart import GAIN, LANE_HEAD, MOST_SHARED, SAMPLE, WORTH, Sharing, pays, set_apart, sharing
from tokenmill.jobs.store import Store

WORDS = [f"{start}{end}" for start in ("ri", "bre", "mo", "whee") for end in ("ver", "ad", "on", "l")]


@dataclass
class Set:
    """Takes words as tokens, and notes how its context is set."""

    lanes: int = 4
    streams: bool = False
    changes_context: bool = True
    refuses: TokenmillError | None = None
    head: tuple[int, ...] = ()  # what its template puts before every prompt
    told: list[dict[str, object]] = field(default_factory=list)

    @property
    def identity(self) -> Identity:
        return Identity("native", "set", "m", "set 1", 4096, self.lanes, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, changes_context=self.changes_context)

    async def set_context(self, **changes: object) -> object:
        if self.refuses is not None:
            raise self.refuses
        self.told.append(changes)
        self.streams = bool(changes["streams"])
        return None

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        assert not request, "nothing is to be answered"
        yield Piece("", 0)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        if "refused" in str(prompt):
            raise RequestRefused("not this one")
        return self.head + tuple(int.from_bytes(word.encode()[-7:]) for word in str(prompt).split())

    async def status(self) -> Status:
        return Status("ready", self.identity, Counters())

    async def close(self) -> None:
        return None


def alone(count: int, words: int = 60) -> list[str]:
    return [
        " ".join(f"{WORDS[(number * 7 + at) % len(WORDS)]}{number}" for at in range(words)) for number in range(count)
    ]


def asked(engine: Set, prompts: Sequence[str], folder: Path) -> str | None:
    with Store(folder / "store") as store:
        batch = submitted(store, folder / "jobs.jsonl", prompts, max_tokens=64)
        return asyncio.run(set_apart(engine, store, batch))


@pytest.mark.parametrize(
    ("shared", "jobs", "lanes", "wanted"),
    [
        (0.0, 100, 8, True),
        (MOST_SHARED * 200, 100, 8, True),
        (MOST_SHARED * 200 + 0.1, 100, 8, False),
        (150.0, 100, 8, False),
        (0.0, WORTH * 8 - 1, 8, False),  # over before it pays
        (0.0, 100, 1, False),  # nobody to be apart from
    ],
)
def test_what_is_lost_is_held_against_what_is_gained(shared: float, jobs: int, lanes: int, wanted: bool) -> None:
    assert pays(Sharing(168, shared, 32), jobs, lanes) is wanted


@pytest.mark.parametrize("answer_tokens", [1.0, 24.0, 32.0])
def test_short_answers_are_no_reason_to_stay_together(answer_tokens: float) -> None:
    assert pays(Sharing(105, 0.0, answer_tokens), 64, 8)


def test_it_never_gives_up_more_than_it_gains() -> None:
    assert 0 < MOST_SHARED < GAIN
    assert Sharing(0, 0, 0).share == 0


def test_a_batch_that_shares_nothing_is_set_apart(tmp_path: Path) -> None:
    engine = Set()
    said = asked(engine, alone(40), tmp_path)
    assert engine.told == [{"streams": True}]
    assert said is not None
    assert said.startswith("each lane has cells of its own: ")


@pytest.mark.parametrize(
    "prompts",
    [
        [f"{' '.join(WORDS * 5)} {text}" for text in alone(40)],  # one head
        [f"{' '.join(WORDS * 9)} {number % 4} {text}" for number, text in enumerate(alone(40))],  # and longer ones
        [text for text in alone(20) for _ in range(2)],  # all twice
        [f"{' '.join(f'{word}{number // 2}' for word in WORDS * 6)} {text}" for number, text in enumerate(alone(40))],
    ],
)
def test_a_batch_that_shares_heads_is_not(prompts: list[str], tmp_path: Path) -> None:
    engine = Set()
    assert asked(engine, prompts, tmp_path) is None
    assert not engine.told


def test_what_a_template_puts_before_every_prompt_is_no_loss_if_it_is_short(tmp_path: Path) -> None:
    """Each lane has it from its last prompt."""
    few, many = Set(head=tuple(range(LANE_HEAD))), Set(head=tuple(range(LANE_HEAD + 1)))
    for engine in (few, many):
        folder = tmp_path / str(len(engine.head))
        folder.mkdir()
        asked(engine, alone(40), folder)
    assert (few.streams, many.streams) == (True, False)


def test_pairs_among_many_are_seen_although_few_are_compared(tmp_path: Path) -> None:
    """Each head has two jobs, and the sample is far too coarse to meet both."""
    prompts = [
        f"{' '.join(f'{word}{number // 2}' for word in WORDS * 6)} tail{number}" for number in range(20 * SAMPLE)
    ]
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts)
        found = asyncio.run(sharing(Set(), store, batch))
    assert found is not None
    assert 0.25 < found.shared_tokens / found.prompt_tokens <= 0.5  # half, less what a chunk cuts off


def test_an_engine_goes_back_for_a_batch_that_shares(tmp_path: Path) -> None:
    engine = Set(streams=True)
    said = asked(engine, [f"{' '.join(WORDS * 5)} {text}" for text in alone(40)], tmp_path)
    assert engine.told == [{"streams": False}]
    assert said is not None
    assert "share their cells again" in said


def test_one_that_is_apart_already_stays_so(tmp_path: Path) -> None:
    engine = Set(streams=True)
    assert asked(engine, alone(40), tmp_path) is None
    assert not engine.told


@pytest.mark.parametrize(
    "engine",
    [
        Set(changes_context=False),
        Set(refuses=EngineError("not with this model")),
        Set(refuses=UsageError("too few cells")),
    ],
)
def test_an_engine_that_cannot_is_left_alone(engine: Set, tmp_path: Path) -> None:
    assert asked(engine, alone(40), tmp_path) is None
    assert not engine.streams


def test_refused_lines_tell_nothing(tmp_path: Path) -> None:
    engine = Set()
    assert asked(engine, ["refused"] + [f"refused {text}" for text in alone(30)], tmp_path) is None
    assert asked(engine, [*alone(30), "refused"], _folder(tmp_path)) is not None


def _folder(path: Path) -> Path:
    made = path / "more"
    made.mkdir()
    return made
