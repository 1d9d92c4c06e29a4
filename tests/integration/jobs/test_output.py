"""The output file: each custom_id once, in order, final as far as it goes, and mended after whatever happened to it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.jobs_store import answer, pending, submitted
from tokenmill.errors import StoreInUse, TokenmillError, UsageError
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Batch, Failure, JobId, Result, State, Submission
from tokenmill.jobs.output import Output, output_line
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store

LETTERS = ["a", "b", "c", "d", "e"]


def read(path: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path or "").read_text().splitlines()]


def numbers(path: str | None) -> list[int]:
    return [int(line["id"].rpartition("_")[2]) for line in read(path)]


def finish(store: Store, batch: Batch, *which: int, text: str = "yes") -> None:
    jobs = [JobId.of(batch.id, number) for number in which]
    store.start(jobs)
    store.commit([answer(job, text) for job in jobs])


def test_the_form_of_a_line() -> None:
    done = Result(3, State.DONE, 'a"ü', bytes(32), b'{"text": "hi"}', None, None)
    assert json.loads(output_line("batch_0f", done)) == {
        "id": "batch_req_0f_3",
        "custom_id": 'a"ü',
        "response": {"status_code": 200, "request_id": "req_" + "0" * 24, "body": {"text": "hi"}},
        "error": None,
    }
    failed = Result(4, State.FAILED, None, None, None, "invalid_line", "not JSON\n")
    assert json.loads(output_line("batch_0f", failed)) == {
        "id": "batch_req_0f_4",
        "custom_id": None,
        "response": None,
        "error": {"code": "invalid_line", "message": "not JSON\n", "line": 4},
    }
    assert output_line("batch_0f", failed).count(b"\n") == 1
    aside = json.loads(output_line("batch_0f", Result(5, State.QUARANTINED, "x", b"", None, None, None)))
    assert aside["error"] == {"code": "quarantined", "message": "quarantined", "line": 5}


def test_lines_appear_when_all_before_them_are_there(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS)
        with Output(store, batch) as output:
            assert output.advance() == 0
            finish(store, batch, 2, 4)
            assert output.advance() == 0
            finish(store, batch, 1)
            assert output.advance() == 2
            assert numbers(batch.output) == [1, 2]
            store.fail(JobId.of(batch.id, 3), Failure("too_long", "by 5 tokens"))
            assert output.advance() == 2
            assert not output.finish()
            finish(store, batch, 5)
            assert output.finish()
            assert output.written == 5
        assert [line["custom_id"] for line in read(batch.output)] == ["1-a", "2-b", "3-c", "4-d", "5-e"]
        assert read(batch.output)[2]["error"] == {"code": "too_long", "message": "by 5 tokens", "line": 3}


def test_bad_lines_and_blank_ones(tmp_path: Path, address: Address) -> None:
    (tmp_path / "j").write_text('\n{"custom_id": "x"}\n\n{"prompt": "a"}\n{\n')
    with Store(address) as store:
        batch = submit(store, tmp_path / "j", Submission("m", output=str(tmp_path / "out"))).batch
        finish(store, batch, 4)
        with Output(store, batch) as output:
            assert output.finish()
        found = read(batch.output)
        assert [(line["custom_id"], (line["error"] or {}).get("line")) for line in found] == [
            ("x", 2),
            ("line-4", None),
            (None, 5),
        ]


def test_errors_in_a_file_of_their_own(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS, {"errors": str(tmp_path / "err")})
        store.fail(JobId.of(batch.id, 1), Failure("timeout", "slow"))
        finish(store, batch, 2, 3)
        with Output(store, batch) as output:
            assert output.advance() == 3
        store.fail(JobId.of(batch.id, 4), Failure("timeout", "slow"))
        finish(store, batch, 5)
        with Output(store, batch) as output:
            assert output.written == 3
            assert output.finish()
        assert numbers(batch.output) == [2, 3, 5]
        assert numbers(batch.errors) == [1, 4]


def test_what_is_in_the_file_is_never_written_again(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS)
        finish(store, batch, 1, 2)
        with Output(store, batch) as output:
            output.advance()
        path = Path(batch.output or "")
        inode, before = path.stat().st_ino, path.read_bytes()
        finish(store, batch, 3, 4, 5)
        with Output(store, batch) as output:
            assert output.finish()
        assert path.stat().st_ino == inode
        assert path.read_bytes().startswith(before)


def test_a_torn_file_is_mended(tmp_path: Path, address: Address) -> None:
    """Cut anywhere, with zeros behind or not: the same bytes come again."""
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS)
        finish(store, batch, 1, 2, 3, 4, 5, text="ü" * 30)
        with Output(store, batch) as output:
            assert output.finish()
        path = Path(batch.output or "")
        whole = path.read_bytes()

        @settings(max_examples=60, deadline=None)
        @given(st.integers(0, len(whole)), st.sampled_from([0, 0, 700]))
        def torn(kept: int, zeros: int) -> None:
            path.write_bytes(whole[:kept] + b"\0" * zeros)
            with Output(store, batch) as output:
                assert output.finish()
            assert path.read_bytes() == whole

        torn()


def test_errors_that_are_tried_again_are_replaced(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS)
        finish(store, batch, 1, 3, 4, 5)
        store.fail(JobId.of(batch.id, 2), Failure("timeout", "slow"))
        with Output(store, batch) as output:
            assert output.finish()
        before = read(batch.output)
        assert store.retry(batch.id) == 1
        with Output(store, batch) as output:
            assert numbers(batch.output) == [1]  # what follows comes back when line 2 has its outcome
            finish(store, batch, 2)
            assert output.finish()
        after = read(batch.output)
        assert [line["custom_id"] for line in after] == [line["custom_id"] for line in before]
        assert after[1]["response"]["body"] == {"text": "yes"}
        assert after[2:] == before[2:]


@pytest.mark.parametrize("content", ["my thesis\n", '{"id":"batch_req_ffff_1","custom_id":"x"}\n'])
def test_files_of_others_are_not_touched(tmp_path: Path, address: Address, content: str) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS)
        path = Path(batch.output or "")
        path.write_text(content)
        with pytest.raises(UsageError) as caught:
            Output(store, batch)
        assert caught.value.code == "foreign_output"
        assert caught.value.hint
        assert path.read_text() == content
        finish(store, batch, 1)
        with Output(store, batch, replace=True) as output:
            output.advance()
        assert numbers(batch.output) == [1]


def test_a_note_at_the_end_is_not_cut_off(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS, {"errors": str(tmp_path / "err")})
        finish(store, batch, 1)
        store.fail(JobId.of(batch.id, 2), Failure("timeout", "slow"))
        with Output(store, batch) as output:
            output.advance()
        with (tmp_path / "err").open("a") as file:
            file.write("looked at these, all fine\n")
        with pytest.raises(UsageError, match="after byte"):
            Output(store, batch)
        with Output(store, batch, replace=True) as output:
            assert output.advance() == 2
        assert (numbers(batch.output), numbers(batch.errors)) == ([1], [2])


def test_one_writer(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS)
        with Output(store, batch), pytest.raises(StoreInUse):
            Output(store, batch)


def test_no_folder_no_file_no_name(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a"], {"output": str(tmp_path / "none" / "out")})
        with pytest.raises(UsageError) as caught:
            Output(store, batch)
        assert caught.value.code == "no_output_folder"
        batch = submitted(store, tmp_path / "j", ["a"], {"output": str(tmp_path)})
        with pytest.raises(UsageError) as caught:
            Output(store, batch)
        assert caught.value.code == "output_is_folder"
        batch = submitted(store, tmp_path / "j", ["a"], {"output": None})
        with pytest.raises(UsageError) as caught:
            Output(store, batch)
        assert caught.value.code == "no_output"


def test_the_folder_goes_while_it_is_written(tmp_path: Path, address: Address) -> None:
    (tmp_path / "o").mkdir()
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", LETTERS, {"output": str(tmp_path / "o" / "out")})
        with Output(store, batch) as output:
            finish(store, batch, 1)
            output.advance()
            (tmp_path / "o").rename(tmp_path / "moved")
            finish(store, batch, 2)
            with pytest.raises(TokenmillError, match=str(tmp_path / "o" / "out")) as caught:
                output.advance()
            assert "same command" in (caught.value.hint or "")
            (tmp_path / "moved").rename(tmp_path / "o")
            output.advance()
        assert numbers(batch.output) == [1, 2]


def test_a_pipe_takes_lines_too(tmp_path: Path, address: Address) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (
        Store(address) as store,
        subprocess.Popen(
            [sys.executable, "-c", "import sys; print(len(open(sys.argv[1]).readlines()))", tmp_path / "fifo"],
            stdout=subprocess.PIPE,
        ) as reader,
    ):
        batch = submitted(store, tmp_path / "j", LETTERS, {"output": str(tmp_path / "fifo")})
        finish(store, batch, *range(1, 6))
        with Output(store, batch) as output:
            assert output.finish()
        assert reader.communicate(timeout=120)[0] == b"5\n"


def test_shared_answers_have_the_same_bytes(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a", "a"])
        store.start(pending(store, batch))
        store.commit([answer(JobId.of(batch.id, 1))])
        with Output(store, batch) as output:
            assert output.finish()
        one, other = read(batch.output)
        assert one["response"] == other["response"]
        assert one["id"] != other["id"]
