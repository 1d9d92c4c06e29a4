"""Files into the store: found again, gone on with, refused whole; by one process or several."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs_store import answer, pending, submitted, write_jobs
from support.postgres import asked, text_of
from support.processes import command_lines
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.jobs.ingest import submit as submit_module
from tokenmill.jobs.ingest.line import ParseOptions
from tokenmill.jobs.ingest.parsing import parsed
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Counts, JobId, State, Submission
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store
from tokenmill.storage.lines import BadLine, Chunk, open_source

HOW = Submission("m", output="/somewhere/out.jsonl")


def test_the_same_again_is_the_same_batch(tmp_path: Path, address: Address) -> None:
    path = write_jobs(tmp_path / "j", ["a", "b"])
    with Store(address) as store:
        first = submit(store, path, HOW)
        assert not first.continued
        again = submit(store, path, HOW)
        assert again.continued
        assert again.batch == first.batch
        (tmp_path / "copy").write_bytes(path.read_bytes())
        assert submit(store, tmp_path / "copy", HOW).batch.id == first.batch.id
        others = [
            Submission("n", output=HOW.output),
            Submission("m", output="/other"),
            Submission("m"),
            Submission("m", output=HOW.output, defaults={"max_tokens": 5}),
        ]
        assert len({submit(store, path, how).batch.id for how in [HOW, *others]}) == 5
        write_jobs(path, ["a", "c"])
        assert not submit(store, path, HOW).continued


def test_without_reuse_a_finished_batch_is_done_anew_and_an_unfinished_one_gone_on_with(
    tmp_path: Path, address: Address
) -> None:
    path = write_jobs(tmp_path / "j", ["a", "a"])
    how = Submission("m", output="/out", reuse=False)
    with Store(address) as store:
        batch = submit(store, path, how).batch
        first, second = pending(store, batch)
        assert len(store.start([first, second]).running) == 2  # equal lines are each computed
        store.commit([answer(first)])
        assert submit(store, path, how).batch.id == batch.id
        store.commit([answer(second)])
        anew = submit(store, path, how)
        assert not anew.continued
        assert anew.batch.counts == Counts(pending=2)
        assert submit(store, path, how).batch.id == anew.batch.id


def test_a_submit_that_was_cut_off_goes_on(tmp_path: Path, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_module, "GROUP_LINES", 1000)
    path = write_jobs(tmp_path / "j", [f"{number} " + "x" * 300 for number in range(10_000)])
    with Store(address) as store:

        def stop(line: int) -> None:
            if line > 4000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            submit(store, path, HOW, processes=0, progress=stop)
        (half,) = store.batches()
        assert half.sealed_s is None
        assert not half.finished
        assert 4000 < half.counts.pending < 10_000
    with Store(address) as store:
        told: list[int] = []
        done = submit(store, path, HOW, processes=0, progress=told.append)
        assert done.continued
        assert done.batch.id == half.id
        assert told[0] > 4000
        assert done.batch.counts == Counts(pending=10_000)
        assert done.batch.lines == 10_000
        lines = path.read_text().splitlines()
        for number in (1, 4000, half.lines, half.lines + 1, 10_000):
            job = store.job(JobId.of(half.id, number))
            assert job is not None
            assert job.line == lines[number - 1]


def test_other_chunks_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that straddles what is stored is cut, wherever the first time stopped."""
    from tokenmill.jobs.ingest.submit import _after

    chunk = Chunk(5, b"e\nf\n\nh\n")
    assert _after(chunk, 4) == chunk
    assert _after(chunk, 5) == Chunk(6, b"f\n\nh\n")
    assert _after(chunk, 7) == Chunk(8, b"h\n")
    assert _after(chunk, 8) is None
    assert _after(chunk, 99) is None
    assert _after(BadLine(3, ""), 3) is None
    assert _after(BadLine(4, ""), 3) == BadLine(4, "")


@pytest.mark.parametrize("lines", [(1, 3), (5, 30_000)])
def test_a_custom_id_twice_refuses_the_file(tmp_path: Path, address: Address, lines: tuple[int, int]) -> None:
    first, second = lines
    texts = [json.dumps({"custom_id": f"c{number}", "prompt": "a"}) for number in range(1, second + 10)]
    texts[second - 1] = json.dumps({"custom_id": f"c{first}", "prompt": "b"})
    path = tmp_path / "j"
    path.write_text("\n".join(texts))
    with Store(address) as store:
        with pytest.raises(
            UsageError,
            match=f"lines {first} and {second} .*'c{first}'",
            check=lambda error: error.code == "duplicate_custom_id",
        ):
            submit(store, path, HOW)
        assert store.batches() == []
        assert asked(address, "SELECT (SELECT count(*) FROM jobs) + (SELECT count(*) FROM blocks)") == [(0,)]


def test_a_made_up_custom_id_counts_too(tmp_path: Path, address: Address) -> None:
    path = tmp_path / "j"
    path.write_text('{"prompt": "a", "custom_id": "line-2"}\n{"prompt": "b"}\n')
    with Store(address) as store, pytest.raises(UsageError, match="lines 1 and 2 .*'line-2'"):
        submit(store, path, HOW)


def test_bad_lines_fail_and_the_rest_runs(tmp_path: Path, address: Address) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"prompt": "a"}\n\n{\n{"custom_id": "x", "prompt": 5}\n\xff\n{"prompt": "b"}')
    with Store(address) as store:
        batch = submit(store, path, HOW).batch
        assert batch.counts == Counts(pending=2, failed=3)
        found = store.results(batch.id, 0, 10)
        assert [(item.number, item.custom_id, item.state) for item in found] == [
            (1, "line-1", State.PENDING),
            (3, None, State.FAILED),
            (4, "x", State.FAILED),
            (5, None, State.FAILED),
            (6, "line-6", State.PENDING),
        ]
        assert store.retry(batch.id) == 0  # sending them again cannot help
        with pytest.raises(UsageError, match="line 3: not JSON.*line 4: prompt.*line 5: not UTF-8"):
            submit(store, path, Submission("m", strict=True))
        with pytest.raises(UsageError, match="line 3: not JSON"):
            submit(store, path, Submission("m", output=HOW.output, strict=True))
        assert len(store.batches()) == 1


def test_an_empty_file_is_a_finished_batch(tmp_path: Path, address: Address) -> None:
    (tmp_path / "j").write_bytes(b"\n")
    with Store(address) as store:
        assert submit(store, tmp_path / "j", HOW).batch.finished


STDIN = """
import sys
from tokenmill.jobs.store.address import address_of
from tokenmill.jobs.models import JobId, Submission
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.ingest.submit import submit
with Store(address_of(sys.argv[1])) as store:
    done = submit(store, "-", Submission("m", output="/out"))
    print(done.batch.id, done.continued, done.batch.counts.total, len(store.batches()))
"""


def test_a_stream_is_found_again_by_what_it_holds(address: Address) -> None:
    def piped(text: str) -> str:
        command = [sys.executable, "-c", STDIN, text_of(address)]
        return subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout.strip()

    assert piped('{"prompt": "a"}\n{"prompt": "b"}\n') == "1 False 2 1"
    assert piped('{"prompt": "a"}\n{"prompt": "b"}\n') == "1 True 2 1"
    assert piped('{"prompt": "a"}\n').endswith("False 1 2")


def test_half_a_stream_is_dropped_at_the_next_opening(address: Address) -> None:
    with Store(address) as store:
        batch = store.submissions.begin(HOW, source="stdin", key=None)
        store.submissions.add(
            batch,
            [(0, "a", b"i", b"p", 0, 1, None, None, None, None, JobId.of(batch, 1))],
            [(JobId.of(batch, 1), b"{}")],
        )
        assert store.batch(batch).counts.pending == 1
    with Store(address) as store:
        assert store.batches() == []


def test_forgetting_that_was_cut_off_is_finished_later(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        with store._database.writing(durable=True):
            store._database.run("mark_removed", batch=batch.id)
            store._database.run("forget_jobs", first=JobId.of(batch.id, 0), last=JobId.of(batch.id, 1))
    with Store(address) as store:
        assert store.batches() == []
        assert submitted(store, tmp_path / "j", ["a", "b"]).counts == Counts(pending=2)


# Processes.


def test_processes_give_the_same_rows_in_order(tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "j", [f"{number} " + "x" * 900 for number in range(8000)], temperature=1)
    with path.open("ab") as file:
        file.write(b'\xff\n{"bad": 1}\n')
    reading = ParseOptions(1, "m", 3, True, {"max_tokens": 7})
    found = []
    for processes in (0, 1, 2):
        with open_source(path) as source:
            found.append(
                [(item[0], [tuple(row) for row in rows]) for item, rows in parsed(source.chunks(), reading, processes)]
            )
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 10
    assert sum(len(rows) for _, rows in found[0]) == 8002


def test_no_process_is_left(tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "j", [f"{number} " + "x" * 900 for number in range(2000)])
    with open_source(path) as source:
        lines = parsed(source.chunks(), ParseOptions(1, "m"), 2)
        next(lines)
        assert _children()
        lines.close()
    assert not _children()


def test_a_parser_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jobs(tmp_path / "j", ["a"])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with open_source(path) as source, pytest.raises(TokenmillError, match="ended with status 1") as caught:
        list(parsed(source.chunks(), ParseOptions(1, "m"), 1))
    assert caught.value.hint


ORPHAN = """
import os, sys, pathlib, signal
from tokenmill.jobs.ingest.line import ParseOptions
from tokenmill.jobs.ingest.parsing import parsed
from tokenmill.storage.lines import open_source
with open_source(sys.argv[1]) as source:
    rows = parsed(source.chunks(), ParseOptions(1, "m"), 2)
    next(rows)
    children = pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    print(children, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_parsers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "j", [f"{number} " + "x" * 900 for number in range(3000)])
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(path)], check=False, capture_output=True, text=True, timeout=200
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        try:
            waiting = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        import select

        assert select.select([waiting], [], [], 30)[0], f"parser {pid} is still there"
        os.close(waiting)


def _children() -> list[int]:
    return [pid for pid, command in command_lines().items() if "tokenmill.jobs.ingest.parsing" in command]


def test_no_such_batch(address: Address) -> None:
    with Store(address) as store:
        with pytest.raises(StoreError, match="batch 5 "):
            store.batch(5)
        with pytest.raises(UsageError, match="'x'", check=lambda error: error.code == "batch_not_found"):
            store.named("x")
        assert store.job(5) is None
