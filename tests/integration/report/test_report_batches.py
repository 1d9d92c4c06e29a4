"""Batches of a report, read from a store: the latest of a model, with the finish reasons of their stored answers."""

import json
from pathlib import Path

import pytest

from support.jobs_store import pending, submitted
from tokenmill.jobs.models import Batch, FinishedJob
from tokenmill.jobs.store.store import Store
from tokenmill.report import batches
from tokenmill.report.batches import read_batches


def answered(store: Store, path: Path, reasons: list[str], model: str = "m") -> Batch:
    """A batch whose answers ended for these reasons; one more job has no answer."""
    prompts = [f"{path.name}-{number}" for number in range(len(reasons) + 1)]
    batch = submitted(store, path, prompts, {"model_id": model})
    for job, reason in zip(pending(store, batch), reasons, strict=False):
        store.start([job])
        body = {"object": "text_completion", "choices": [{"text": "x", "finish_reason": reason}]}
        store.commit([FinishedJob(job, json.dumps(body).encode(), prompt_tokens=10, completion_tokens=2)])
    return store.batch(batch.id)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[Batch]]:
    """A store with three batches of two models."""
    address = tmp_path / "store"
    with Store(address) as store:
        first = answered(store, tmp_path / "a", ["stop", "length", "stop"])
        other = answered(store, tmp_path / "b", ["length"], model="other")
        last = answered(store, tmp_path / "c", ["tool_calls", "length"])
    return address, [first, other, last]


def test_answers_by_finish_reason(stored: tuple[Path, list[Batch]]) -> None:
    address, (first, other, last) = stored
    found, reasons = read_batches(address, "m")
    assert [batch.name for batch in found] == [first.name, last.name]
    assert reasons == {first.name: {"stop": 2, "length": 1}, last.name: {"tool_calls": 1, "length": 1}}
    assert read_batches(address, None)[1][other.name] == {"length": 1}


def test_the_newest_batches_are_counted_first(
    stored: tuple[Path, list[Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, (_, other, last) = stored
    monkeypatch.setattr(batches, "MAX_READ_ANSWERS", 3)
    found, reasons = read_batches(address, None)
    assert (len(found), set(reasons)) == (3, {other.name, last.name})
    monkeypatch.setattr(batches, "MAX_BATCHES", 1)
    assert [batch.name for batch in read_batches(address, None)[0]] == [last.name]


def test_no_store(tmp_path: Path) -> None:
    assert read_batches(tmp_path / "absent", None) == ((), {})
