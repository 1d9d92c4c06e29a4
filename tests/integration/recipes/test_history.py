"""Outcomes of lines and lengths of answers, read from a store for forecasts."""

import json
from pathlib import Path
from typing import Any

from support.jobs_store import pending
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Batch, Failure, FinishedJob, JobId, Submission
from tokenmill.jobs.store.store import Store
from tokenmill.recipes.history import Lengths, lengths, settled_lines, stored_answer
from tokenmill.recipes.runner import Line, chat_line, line_bytes


def asked(stage: str, jobs: int, tokens: int | None = 100) -> list[Line]:
    return [chat_line(f"{n}", [{"role": "user", "content": f"{stage} {n} ü"}], max_tokens=tokens) for n in range(jobs)]


def stored(store: Store, folder: Path, stage: str, lines: list[Line], model_id: str = "m") -> Batch:
    path = folder / "lines.jsonl"
    path.write_bytes(b"".join(map(line_bytes, lines)))
    return submit(store, path, Submission(model_id), source_name=f"expand: {stage}").batch


def answer(store: Store, batch: Batch, count: int, tokens: int | None) -> None:
    jobs = pending(store, batch)[:count]
    store.start(jobs)
    usage: dict[str, Any] = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    store.commit([FinishedJob(job, json.dumps({"choices": [], **usage}).encode()) for job in jobs])


def test_settled_lines_are_found_by_position(tmp_path: Path) -> None:
    lines = asked("write", 5)
    with Store(tmp_path / "s") as store:
        assert settled_lines(store, "m", lines) == frozenset()
        batch = stored(store, tmp_path, "write", lines)
        second, fourth = (JobId.of(batch.id, number) for number in (2, 4))
        store.start([second, fourth])
        store.commit([FinishedJob(second, b"{}")])
        store.fail(fourth, Failure("too_long", "by much"))
        assert settled_lines(store, "m", lines) == {1, 3}
        assert settled_lines(store, "another", lines) == frozenset()
        assert settled_lines(store, "m", lines[:4]) == {1}  # answered; failures count only in their own batch


def test_answers_are_found_in_any_batch(tmp_path: Path) -> None:
    lines = asked("write", 3)
    with Store(tmp_path / "s") as store:
        answer(store, stored(store, tmp_path, "write", lines[:2]), 2, 8)
        renamed = [{**line, "custom_id": f"again {number}"} for number, line in enumerate(lines)]
        assert settled_lines(store, "m", [renamed[2], renamed[1], renamed[0]]) == {1, 2}
        assert settled_lines(store, "m", asked("write", 3, tokens=99)) == frozenset()
        assert settled_lines(store, "m", [{"custom_id": "\ud800"}]) == frozenset()
        found = stored_answer(store, "m", renamed[1])
        assert found is not None
        assert (found.custom_id, found.body) == ("again 1", {"choices": [], "usage": {"completion_tokens": 8}})
        assert stored_answer(store, "m", lines[2]) is None


def test_lengths_come_from_the_same_stage_if_there_are_enough(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        answer(store, stored(store, tmp_path, "write", asked("write", 10)), 10, 80)
        answer(store, stored(store, tmp_path, "judge", asked("judge", 10)), 5, 20)
        answer(store, stored(store, tmp_path, "judge", asked("else", 9), "another"), 9, 1)
        found = lengths(store, "m", ["write", "judge", "reduce"])
        overall = Lengths(0.6, 15, same_stage=False)
        assert found == {"write": Lengths(0.8, 10, same_stage=True), "judge": overall, "reduce": overall}


def test_answers_without_usage_do_not_count(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        answer(store, stored(store, tmp_path, "write", asked("write", 3)), 3, None)
        answer(store, stored(store, tmp_path, "free", asked("free", 3, tokens=None)), 3, 50)
        assert lengths(store, "m", ["write"]) == {}


def test_a_lone_surrogate_is_escaped() -> None:
    line = {"custom_id": "\ud800"}
    assert line_bytes(line) == b'{"custom_id":"\\ud800"}\n'
    assert json.loads(line_bytes(line)) == line
    assert line_bytes({"a": "ü"}) == '{"a":"ü"}\n'.encode()
