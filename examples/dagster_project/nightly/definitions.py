"""What is milled every night: headlines for the day's notes, summaries of documents, a dataset, a teacher's answers.

TOKENMILL_URL says where `tokenmill serve` is, NIGHTLY_OUT where tables go.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_tokenmill import (
    TokenmillResource,
    batch_asset,
    checks_for,
    distill_asset,
    expand_asset,
    finished_batches_sensor,
    summarize_asset,
)
from tokenmill.recipes import DistillOptions, SamplingOptions, chat_line

HERE = Path(__file__).parent.parent
DATA, OUT = HERE / "data", Path(os.environ.get("NIGHTLY_OUT", HERE / "out"))
NIGHTS = dg.DailyPartitionsDefinition(start_date="2026-11-01")
RULES = "You name notes of a machine room. Answer with one headline of at most eight words, and nothing else."

HEADLINE = {"type": "string", "minLength": 1}


@dg.asset(partitions_def=NIGHTS)
def notes(context: dg.AssetExecutionContext) -> list[dict[str, Any]]:
    """The notes of the day; Dagster's own IO manager keeps them."""
    lines = (DATA / "notes.jsonl").read_text(encoding="utf-8").splitlines()
    return [{**json.loads(line), "day": context.partition_key} for line in lines]


def headline_lines(_: dg.AssetExecutionContext, notes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A job for each note, all behind the same rules: their head is computed once."""
    for note in notes:
        asked = [{"role": "system", "content": RULES}, {"role": "user", "content": f"{note['day']}: {note['note']}"}]
        yield chat_line(note["id"], asked, max_tokens=int(os.environ.get("NIGHTLY_TOKENS", "24")), temperature=0)


headlines = batch_asset(
    "headlines",
    path=str(OUT / "headlines" / "{partition}.parquet"),
    lines=headline_lines,
    ins={"notes": dg.AssetIn()},
    partitions_def=NIGHTS,
    retry_policy=dg.RetryPolicy(max_retries=3, delay=30),
)

summaries = summarize_asset(
    "summaries",
    path=str(OUT / "summaries" / "{partition}.parquet"),
    folder=str(OUT / "summaries" / "texts"),  # one for all nights: what has not changed is not done again
    docs=DATA / "docs",
    max_tokens=48,
    partitions_def=NIGHTS,
)

dataset = expand_asset(
    "dataset",
    path=str(OUT / "dataset.parquet"),
    seeds=DATA / "seeds.jsonl",
    ways=["harder", "broader"],
    judge=False,  # a model as small as the example's is no judge
    keep_seeds=True,
    drawing=SamplingOptions(max_tokens=160),  # an example that is cut is dropped
)

teacher = distill_asset(
    "teacher",
    path=str(OUT / "teacher.parquet"),
    prompts="dataset",
    column="instruction",
    ask=DistillOptions(max_tokens=24, top_logprobs=3),
)


@dg.op
def told(context: dg.OpExecutionContext) -> None:
    """What follows a batch that somebody else has handed in."""
    context.log.info(f"{context.run.tags['tokenmill/batch']} is done")


@dg.job
def batch_over() -> None:
    """Runs once for each."""
    told()


night = dg.define_asset_job("night", selection=["notes", "headlines", "summaries"], partitions_def=NIGHTS)

defs = dg.Definitions(
    assets=[notes, headlines, summaries, dataset, teacher],
    asset_checks=[
        *checks_for(
            headlines, rows=(1, 1000), duplicates_at_most=0.5, valid={"text": {"type": "string", "minLength": 1}}
        ),
        *checks_for(dataset, rows=(4, None), severity=dg.AssetCheckSeverity.WARN),
    ],
    jobs=[night, batch_over],
    schedules=[dg.build_schedule_from_partitioned_job(night, hour_of_day=1)],
    sensors=[finished_batches_sensor("batches_over", target=batch_over, metadata={"source": "by hand"})],
    resources={
        "tokenmill": TokenmillResource(
            base_url=os.environ.get("TOKENMILL_URL", "http://127.0.0.1:8181"),
            api_key=os.environ.get("TOKENMILL_API_KEY"),
            poll_s=float(os.environ.get("NIGHTLY_POLL_S", "2")),
            cost_per_hour=0.40,
            currency="EUR",
        )
    },
)
