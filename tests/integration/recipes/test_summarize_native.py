"""Summaries by the real engine: split documents, one shared prefix, reused answers."""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from support.native_engine import native, plan_for, run
from tokenmill.engine.engine import Engine
from tokenmill.jobs.store.store import Store
from tokenmill.recipes.local_runner import LocalRunner, OpenEngine, Stage
from tokenmill.recipes.runner import AnswerOrigin, Line, RecipeCost
from tokenmill.recipes.summarization.documents import DocumentOptions, gather_documents
from tokenmill.recipes.summarization.manifest import read_manifest
from tokenmill.recipes.summarization.prompts import KINDS, Prompts
from tokenmill.recipes.summarization.recipe import Summarized, SummarizeRequest, summarize

DIGEST = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(6))
PROMPTS = Prompts(DIGEST, dict.fromkeys(KINDS, "Summarize what the user sends."))
CONTEXT, ANSWER = 320, 10
LONG = "".join(
    f"# Mill {number}\n\nMill {number} stands by the river. It grinds wheat and rye.\n\n" for number in range(12)
)


class WatchedMill:
    """A runner that keeps its stages."""

    def __init__(self, runner: LocalRunner) -> None:
        self._mill, self.stages = runner, list[Stage]()

    @property
    def origin(self) -> AnswerOrigin:
        return self._mill.origin

    @property
    def spent(self) -> RecipeCost:
        return self._mill.spent

    async def run(self, stage: str, lines: Iterable[Line]) -> Stage:
        self.stages.append(await self._mill.run(stage, lines))
        return self.stages[-1]

    def cached(self) -> list[int]:
        """Cached prompt tokens of each answer."""
        bodies = [answered.body for stage in self.stages for answered in stage.answers()]
        return [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies if body is not None]


def order(folder: Path) -> SummarizeRequest:
    sampling = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
    return SummarizeRequest(gather_documents([folder / "docs"], DocumentOptions()), folder / "out", PROMPTS, sampling)


def test_repeated_runs_of_summaries(smollm2_path: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "long.md").write_text(LONG)
    (docs / "one.txt").write_text("The harbour is open again.")
    (docs / "two.txt").write_text("The bridge is closed until May.")

    async def night(store: Store, engine: Engine) -> tuple[WatchedMill, Summarized]:
        runner = WatchedMill(LocalRunner(store, tmp_path / "store", OpenEngine(engine)))
        return runner, await summarize(runner, order(tmp_path), tokens=bytes_by_three)

    async def nights() -> None:
        plan = plan_for(smollm2_path, context=CONTEXT, sequences=2)
        with Store(tmp_path / "store") as store:
            async with native(smollm2_path, tmp_path / "state", plan=plan) as engine:
                digest_tokens = len(await engine.tokenize(DIGEST))
                await _nights(store, engine, digest_tokens)

    async def _nights(store: Store, engine: Engine, digest_tokens: int) -> None:
        runner, ended = await night(store, engine)
        assert (ended.documents, ended.done, ended.failed) == (3, 3, ())
        entry = read_manifest(tmp_path / "out").entries["long.md"]
        assert entry.pieces is not None
        assert entry.pieces > 1
        assert entry.levels == 1
        assert (entry.finish_reason, entry.completion_tokens) == ("length", (entry.pieces + 1) * ANSWER)
        # The prefix is computed once, for the first answer.
        assert sum(cached < digest_tokens for cached in runner.cached()) <= 1
        first = runner.spent

        runner, ended = await night(store, engine)
        assert (ended.unchanged, runner.stages) == (3, [])

        (docs / "two.txt").write_text("The bridge is open.")
        runner, ended = await night(store, engine)
        assert (ended.done, ended.unchanged, runner.spent.answers) == (1, 2, 1)

        before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.md")}
        shutil.rmtree(tmp_path / "out")
        runner, ended = await night(store, engine)
        assert (ended.done, runner.spent.answers, runner.spent.reused) == (3, 0, first.answers)
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.md")} == before

    run(nights)


def bytes_by_three(text: str) -> int:
    return -(-len(text.encode()) // 3)


def test_pieces_are_halved_if_tokens_are_underestimated(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "long.md").write_text(LONG)
    wanted = replace(order(tmp_path), prompts=Prompts(None, dict.fromkeys(KINDS, "Summarize.")))

    async def once() -> None:
        plan = plan_for(smollm2_path, context=CONTEXT - 64, sequences=2)
        with Store(tmp_path / "store") as store:
            async with native(smollm2_path, tmp_path / "state", plan=plan) as engine:
                runner = LocalRunner(store, tmp_path / "store", OpenEngine(engine))
                ended = await summarize(runner, wanted, tokens=lambda text: len(text.split()) // 2)
                assert (ended.done, ended.failed) == (1, ())

    run(once)
    entry = read_manifest(tmp_path / "out").entries["long.md"]
    assert entry.pieces == 2
