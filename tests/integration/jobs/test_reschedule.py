"""Another deadline or priority for a batch that is stored."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.jobs_store import Clock, answer, pending, write_jobs
from tokenmill.errors import UsageError
from tokenmill.jobs.ingest import line
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import JobId, Submission
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store

HOW = Submission("m")


def test_a_later_deadline_takes_up_what_was_given_up(tmp_path: Path, address: Address) -> None:
    clock = Clock()
    path = write_jobs(tmp_path / "j", ["a", "b", "c", "d"])
    with path.open("a") as file:
        file.write(f'{{"prompt": "e", "deadline": {clock.now_s + 5}}}\n')
    with Store(address, clock=clock) as store:
        batch = submit(store, path, replace(HOW, deadline_s=clock.now_s + 60)).batch
        store.start([JobId.of(batch.id, 1)])
        store.commit([answer(JobId.of(batch.id, 1))])
        clock.now_s += 100
        assert store.expire() == 4
        assert store.failures_by_code(batch.id) == {"deadline": 4}
        assert submit(store, path, HOW).changed is None  # nothing was said of it
        found = submit(store, path, replace(HOW, deadline_s=clock.now_s + 60))
        assert found.changed is not None
        assert (found.changed.deadline, found.changed.priority, found.changed.revived) == (True, False, 3)
        assert found.batch.deadline_s == clock.now_s + 60
        counts = found.batch.counts
        assert (counts.pending, counts.done, counts.failed) == (3, 1, 1)  # the line's own deadline has passed
        again = submit(store, path, replace(HOW, deadline_s=clock.now_s - 1))
        assert again.changed is not None
        assert again.changed.revived == 0  # nothing is taken up to be given up at once


def test_jobs_that_are_too_late_need_no_engine(tmp_path: Path, address: Address) -> None:
    """They have failed when the file is submitted, so that whoever looks sees that nothing is left."""
    clock = Clock()
    path = write_jobs(tmp_path / "j", ["a", "b"])
    with Store(address, clock=clock) as store:
        late = submit(store, path, replace(HOW, deadline_s=clock.now_s - 1)).batch
        assert (late.finished, late.counts.failed) == (True, 2)
        in_time = submit(store, path, replace(HOW, deadline_s=clock.now_s + 10))
        assert (in_time.batch.finished, in_time.batch.counts.pending) == (False, 2)
        clock.now_s += 11
        again = submit(store, path, HOW)
        assert (again.batch.finished, again.continued, again.batch.counts.failed) == (True, True, 2)
        own = write_jobs(tmp_path / "k", ["c"], deadline=clock.now_s - 5)
        with own.open("a") as file:
            file.write('{"prompt": "d"}\n')
        mixed = submit(store, own, HOW).batch
        assert (mixed.finished, mixed.counts.failed, mixed.counts.pending) == (False, 1, 1)


@pytest.mark.parametrize("block_bytes", [1, 150, 1 << 16])
def test_another_priority_is_for_lines_that_state_none(
    tmp_path: Path, address: Address, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "BLOCK_BYTES", block_bytes)
    texts = [
        '{"prompt": "one"}',
        '{"prompt": "two", "priority": 0}',
        "not json, priority",
        '{"prompt": "of priority"}',
        "",
        '{"prompt": "three", "priority": 7}',
        '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "four", "priority": 0}}',
        '{"prompt": "five"}',
    ]
    (tmp_path / "j").write_text("\n".join(texts))
    with Store(address) as store:
        batch = submit(store, tmp_path / "j", HOW, processes=0).batch
        found = submit(store, tmp_path / "j", replace(HOW, priority=3))
        assert found.changed is not None
        assert (found.changed.priority, found.changed.deadline, found.batch.priority) == (True, False, 3)
        ranks = {item.id & 0xFFFF: -item.rank for item in store.waiting([batch.id], limit=99)}
        assert ranks == {1: 3, 2: 0, 4: 3, 6: 7, 7: 0, 8: 3}
        assert submit(store, tmp_path / "j", replace(HOW, priority=3)).changed is None


def test_a_priority_for_all_bodies_is_as_good_as_stated(tmp_path: Path, address: Address) -> None:
    path = write_jobs(tmp_path / "j", ["a", "b"])
    with Store(address) as store:
        how = replace(HOW, defaults={"priority": 5})
        batch = submit(store, path, how).batch
        submit(store, path, replace(how, priority=1))
        assert {item.rank for item in store.waiting([batch.id], limit=9)} == {-5}


def test_a_batch_whose_output_belongs_to_another_leaves_nothing(
    tmp_path: Path, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = write_jobs(tmp_path / "j", ["a"]), tmp_path / "out.jsonl"
    how = replace(HOW, output=str(output))
    others = '{"id":"batch_req_0123_1"}\n'
    output.write_text(others)
    with Store(address) as store:
        with pytest.raises(UsageError, match="batch_0123", check=lambda error: error.code == "foreign_output"):
            submit(store, path, how)
        assert store.batches() == []
        with path.open() as stream:
            monkeypatch.setattr("sys.stdin", stream)
            with pytest.raises(UsageError, match="batch_0123", check=lambda error: error.code == "foreign_output"):
                submit(store, "-", how)
        assert store.batches() == []
        output.unlink()
        submit(store, path, how)
        output.write_text(others)
        submit(store, path, how)  # the batch exists: the output is not looked at
        output.unlink()
        once = submit(store, path, replace(how, reuse=False)).batch
        store.start(pending(store, once))
        store.commit([answer(JobId.of(once.id, 1))])
        output.write_text(others)
        with pytest.raises(UsageError, match="batch_0123", check=lambda error: error.code == "foreign_output"):
            submit(store, path, replace(how, reuse=False))
        output.unlink()
        assert submit(store, path, replace(how, reuse=False)).batch.id != once.id  # it was still to be found
