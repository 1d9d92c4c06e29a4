"""Errors that are in an output, and whose jobs another process has tried again meanwhile."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.jobs_store import answer, write_jobs
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Counts, Failure, JobId, Submission
from tokenmill.jobs.output import Output
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.store import Store

pytestmark = pytest.mark.usefixtures("unkept")


def said(path: Path) -> list[Any]:
    """Of each line the error's code, or None."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(int(line["custom_id"][0]), line["error"]["code"] if line["error"] else None) for line in lines]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("then", ["answered", "failed"])
def test_a_later_deadline_from_elsewhere_leaves_no_old_errors(
    server: PostgresAddress, tmp_path: Path, apart: bool, then: str
) -> None:
    out, errors = tmp_path / "out", tmp_path / "errors"
    path = write_jobs(tmp_path / "j", ["a", "b", "c"])
    how = Submission("m", output=str(out), errors=str(errors) if apart else None)
    with Store(server) as one, Store(server) as two:
        late = replace(how, deadline_s=one.now_s() + 3600)
        batch = submit(one, path, late).batch
        first, second, third = (JobId.of(batch.id, number) for number in (1, 2, 3))
        one.start([second])
        one.commit([answer(second)])
        one.fail(first, Failure("deadline", "the batch's deadline passed before it was started"))
        assert one.claim_output(batch.id)
        with Output(one, batch) as output:
            output.advance()
            assert said(errors if apart else out)[0] == (1, "deadline")
            revived = submit(two, path, replace(how, deadline_s=two.now_s() + 7200)).changed
            assert revived is not None
            assert revived.revived == 1
            two.start([first, third])
            two.commit([answer(third)])
            if then == "answered":
                two.commit([answer(first)])
            else:
                two.fail(first, Failure("refused", "no"))
            assert output.finish()
            assert output.finish()
        failed: list[tuple[int, str | None]] = [(1, "refused")] if then == "failed" else []
        if apart:
            assert said(errors) == failed
            assert said(out) == [(number, None) for number in (1, 2, 3)[len(failed) :]]
        else:
            assert said(out) == [*(failed or [(1, None)]), (2, None), (3, None)]
        assert one.batch(batch.id).finished


def test_a_pipe_is_written_once(server: PostgresAddress, tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "j", ["a"])
    how = Submission("m", output="/dev/null")
    with Store(server) as one:
        batch = submit(one, path, how).batch
        job = JobId.of(batch.id, 1)
        one.fail(job, Failure("deadline", "late"))
        with Output(one, batch) as output:
            output.advance()
            submit(one, path, replace(how, deadline_s=one.now_s() + 7200))
            one.start([job])
            one.commit([answer(job)])
            assert output.finish()
            assert (output.written, one.batch(batch.id).counts) == (1, Counts(done=1))
