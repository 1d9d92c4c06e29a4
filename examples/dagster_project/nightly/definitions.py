"""Nightly assets: headlines for the day's notes, summaries of documents, a dataset, a teacher's answers.

TOKENMILL_URL is the address of `tokenmill serve`, NIGHTLY_OUT the folder for tables.
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
    """The notes of the day, stored by Dagster's own IO manager."""
    lines = (DATA / "notes.jsonl").read_text(encoding="utf-8").splitlines()
    return [{**json.loads(line), "day": context.partition_key} for line in lines]


def headline_lines(_: dg.AssetExecutionContext, notes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A job for each note; all jobs share the rules as a prefix, which is computed once."""
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
    folder=str(OUT / "summaries" / "texts"),  # the same folder every night: unchanged documents are skipped
    docs=DATA / "docs",
    max_tokens=48,
    partitions_def=NIGHTS,
)

dataset = expand_asset(
    "dataset",
    path=str(OUT / "dataset.parquet"),
    seeds=DATA / "seeds.jsonl",
    ways=["harder", "broader"],
    judge=False,  # the example's model is too small to judge
    keep_seeds=True,
    sampling=SamplingOptions(max_tokens=160),  # answers that are cut off are dropped
)

teacher = distill_asset(
    "teacher",
    path=str(OUT / "teacher.parquet"),
    prompts="dataset",
    column="instruction",
    ask=DistillOptions(max_tokens=24, top_logprobs=3),
)


@dg.op
def log_batch(context: dg.OpExecutionContext) -> None:
    """Log the batch that started this run."""
    context.log.info(f"{context.run.tags['tokenmill/batch']} completed")


@dg.job
def after_batch() -> None:
    """Runs once for each batch that another client submitted."""
    log_batch()


night = dg.define_asset_job("night", selection=["notes", "headlines", "summaries"], partitions_def=NIGHTS)

defs = dg.Definitions(
    assets=[notes, headlines, summaries, dataset, teacher],
    asset_checks=[
        *checks_for(
            headlines, rows=(1, 1000), duplicates_at_most=0.5, valid={"text": {"type": "string", "minLength": 1}}
        ),
        *checks_for(dataset, rows=(4, None), severity=dg.AssetCheckSeverity.WARN),
    ],
    jobs=[night, after_batch],
    schedules=[dg.build_schedule_from_partitioned_job(night, hour_of_day=1)],
    sensors=[finished_batches_sensor("finished_batches", target=after_batch, metadata={"source": "by hand"})],
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
