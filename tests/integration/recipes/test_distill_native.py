"""A teacher's table from the real engine: the tokens are the model's own, and no answer is computed twice."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from support.native import loaded
from support.native_engine import native, plan_for, run
from tokenmill.jobs.store.store import Store
from tokenmill.native.llama.vocab import Vocab
from tokenmill.recipes.distillation.prompts import DistillOptions, DistillPrompts
from tokenmill.recipes.distillation.recipe import Distilled, distill
from tokenmill.recipes.local_runner import LocalRunner, OpenEngine
from tokenmill.recipes.runner import RecipeCost

TEXTS = ("Why is the sky blue?", "Write one line of Python that prints ü and 漢.", "Name three fruits.")
GREEDY = DistillOptions(max_tokens=40, top_logprobs=20)
DRAWN = DistillOptions(samples=2, max_tokens=24, top_logprobs=5, stop=(".",))


@dataclass(frozen=True)
class Taught:
    """The results of several runs on one store."""

    rows: list[dict[str, Any]]
    drawn: list[dict[str, Any]]
    table: Path
    spent: tuple[RecipeCost, ...]  # greedy, repeated, without probabilities, sampled
    found: Distilled
    again: bytes


@pytest.fixture(name="taught", scope="module")
def teach(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("taught")
    source, table, other = folder / "prompts.jsonl", folder / "teacher.parquet", folder / "other.parquet"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))

    async def work() -> Taught:
        spent = list[RecipeCost]()
        async with native(smollm2_path, folder / "state", plan=plan_for(smollm2_path, context=512)) as engine:
            with Store(folder / "batches") as store:
                done = []
                for ask, path in (
                    (GREEDY, table),
                    (GREEDY, folder / "again.parquet"),
                    (replace(GREEDY, top_logprobs=None), other),
                    (DRAWN, folder / "drawn.parquet"),
                ):
                    runner = LocalRunner(store, folder / "batches", OpenEngine(engine))
                    done.append(await distill(runner, DistillPrompts(source), ask, path))
                    spent.append(runner.spent)
        rows, drawn = (parquet.read_table(path).to_pylist() for path in (table, folder / "drawn.parquet"))
        return Taught(rows, drawn, table, tuple(spent), done[0], (folder / "again.parquet").read_bytes())

    return run(work)


@pytest.fixture(name="vocab", scope="module")
def read_vocab(smollm2_path: Path) -> Iterator[Vocab]:
    with loaded(smollm2_path) as model:
        yield model.vocab


def test_tokens_decode_to_the_text(taught: Taught, vocab: Vocab) -> None:
    canonical = 0
    for row in taught.rows:
        assert b"".join(map(vocab.piece, row["token_ids"])).decode(errors="replace") == row["answer"]
        canonical += vocab.tokenize(row["answer"], add_special=False) == tuple(row["token_ids"])
        ended = row["finish_reason"] == "stop"  # by a token that is counted and is not in the answer
        assert len(row["token_ids"]) == row["completion_tokens"] - ended
    assert canonical >= 2  # the greedy tokens of a text are nearly always its canonical tokenization


def test_tokens_of_a_stop_text_are_kept(taught: Taught, vocab: Vocab) -> None:
    stopped = [row for row in taught.drawn if row["finish_reason"] == "stop"]
    assert stopped
    for row in stopped:
        written = b"".join(map(vocab.piece, row["token_ids"])).decode(errors="replace")
        assert written.startswith(row["answer"])
        assert "." not in row["answer"]


def test_probabilities_match_their_tokens(taught: Taught) -> None:
    assert taught.rows
    for row in taught.rows:
        assert row["token_ids"]
        assert len(row["token_ids"]) == len(row["logprobs"]) == len(row["top_ids"]) == len(row["top_logprobs"])
        for token, logprob, ids, tops in zip(
            *(row[name] for name in ("token_ids", "logprobs", "top_ids", "top_logprobs")), strict=True
        ):
            assert len(ids) == len(tops) == 20
            assert ids[0] == token  # greedy
            assert tops == sorted(tops, reverse=True)
            assert tops[0] == pytest.approx(logprob, rel=1 / 2048)
            assert logprob <= 0


def test_samples_have_their_own_seeds(taught: Taught) -> None:
    assert [(row["prompt_id"], row["sample"]) for row in taught.drawn] == [
        (f"prompt-{number}", sample) for number in (1, 2, 3) for sample in (0, 1)
    ]
    assert len({row["seed"] for row in taught.drawn}) == 6
    assert len({row["answer"] for row in taught.drawn}) > 3
    assert {len(top) for row in taught.drawn for top in row["top_ids"]} == {5}


def test_existing_answers_are_reused(taught: Taught) -> None:
    first, again, without, drawn = taught.spent
    assert (first.answers, first.reused) == (3, 0)
    assert (again.answers, again.reused) == (0, 3)
    assert taught.again == taught.table.read_bytes()
    assert without.answers == 3  # answers without probabilities are other jobs
    assert drawn.answers == 6
    assert (taught.found.rows, taught.found.without_ids, taught.found.failed) == (3, 0, 0)


def test_a_token_with_20_probabilities_takes_about_80_bytes(taught: Taught) -> None:
    file = parquet.ParquetFile(taught.table)
    group = file.metadata.row_group(0)
    sizes = {
        group.column(index).path_in_schema.split(".")[0]: group.column(index).total_compressed_size
        for index in range(group.num_columns)
    }
    tokens = sum(len(row["token_ids"]) for row in taught.rows)
    assert tokens > 60
    assert 40 < (sizes["top_ids"] + sizes["top_logprobs"]) / tokens < 130  # a short table, in which few values repeat
