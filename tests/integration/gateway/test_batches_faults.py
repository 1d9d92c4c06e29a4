"""Batches by HTTP with failing engines, and several batches concurrently."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from support import patient
from support.batches import created, events, lines_of, prompt_line, until, uploaded
from support.fake_engine import FakeEngine
from support.gateway import LIMIT_S, Served, config_in, fake_engines, served
from support.gateway_clients import InOrder, open_gate
from support.gateway_clients import until as comes_true
from support.jobs_store import Clock
from tokenmill.errors import StoreFull
from tokenmill.gateway import app
from tokenmill.gateway.batches import routes, runner
from tokenmill.gateway.batches.files import FileStore
from tokenmill.gateway.batches.result_files import write_results
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.http import keys
from tokenmill.jobs.models import Batch
from tokenmill.jobs.store.http_batches import HttpBatch
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store, ask_to_cancel
from tokenmill.jobs.worker.async_store import AsyncStore

Make = Callable[[], Sequence[tuple[str, FakeEngine]]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(
        app, "extra_groups", lambda state: (routes.route_group(state, BatchService(state, 0.02, made)),)
    )
    return made


@contextmanager
def faked(folder: Path, make: Make | None = None, **settings: Any) -> Iterator[tuple[Served, list[FakeEngine]]]:
    made: list[FakeEngine] = []

    def both() -> list[tuple[str, FakeEngine]]:
        engines = list(make()) if make is not None else [("fake", FakeEngine())]
        made.extend(engine for _, engine in engines)
        return engines

    with served(fake_engines(both), config_in(folder, **settings)) as gateway:
        yield gateway, made


def texts(client: Any, batch: Any) -> list[str]:
    return [line["response"]["body"]["choices"][0]["text"] for line in lines_of(client, batch.output_file_id)]


@pytest.mark.usefixtures("clock")
def test_a_new_batch_joins_those_that_run(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, (engine,)):
        client = gateway.client()
        long = created(client, prompt_line("a", "slow one"), prompt_line("b", "two"))
        until(client, long, "in_progress", done=1)
        short = until(client, created(client, *(prompt_line(f"s{n}", f"short {n}") for n in range(5))), "completed")
        assert texts(client, short) == [f"short {n}: 0 1 2 3" for n in range(5)]
        assert client.batches.retrieve(long.id).status == "in_progress"
        assert engine.seen.streams.count("slow one") == 1  # computed once
        client.batches.cancel(long.id)
        done = until(client, long, "cancelled")
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        assert not engine.at_work
        assert [batch.id for batch in client.batches.list(limit=1)] == [short.id, long.id]


@pytest.mark.usefixtures("clock")
def test_equal_lines_of_batches_that_run_together_are_computed_once(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, (engine,)):
        client = gateway.client()
        lines = [prompt_line(f"r{n}", f"steady {n}") for n in range(6)]
        both = [created(client, *lines), created(client, *lines)]
        first, second = (until(client, batch, "completed") for batch in both)
        assert texts(client, first) == texts(client, second)
        assert sorted(engine.seen.streams) == sorted(f"steady {n}" for n in range(6))
        assert first.usage.output_tokens + second.usage.output_tokens == 6 * 30


@pytest.mark.usefixtures("clock")
def test_higher_priority_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, join = threading.Semaphore(0), AsyncStore.join

    async def told(self: AsyncStore, batch: Batch, most: int) -> Any:
        rows = await join(self, batch, most)
        joined.release()  # before anything else happens in that loop, the worker has these rows
        return rows

    monkeypatch.setattr(AsyncStore, "join", told)
    with faked(tmp_path, lambda: [("fake", InOrder(slots=1))]) as (gateway, (engine,)):
        client, gate = gateway.client(), gateway.state.backends[0].gate
        held = created(client, prompt_line("a", "slow"))
        comes_true(lambda: bool(engine.at_work))
        low = created(client, *(prompt_line(f"l{n}", f"aaa low {n}") for n in range(6)))
        assert joined.acquire(timeout=LIMIT_S)
        comes_true(lambda: gate.waiting("batch") == 2)  # what may be in the engine's own queue
        high = created(client, prompt_line("a", "zzz high"), extra_body={"priority": 5})
        assert joined.acquire(timeout=LIMIT_S)
        client.batches.cancel(held.id)
        for batch in (low, high):
            until(client, batch, "completed")
        assert engine.seen.streams[3] == "zzz high"  # behind what was in the engine's own queue already
        assert len(engine.seen.streams) == 8


def test_a_batch_ends_when_its_time_is_over(tmp_path: Path, clock: Clock) -> None:
    with faked(tmp_path) as (gateway, (engine,)):
        client = gateway.client()
        lines = [prompt_line("quick", "quick", priority=9), *(prompt_line(f"s{n}", f"slow {n}") for n in range(20))]
        batch = until(client, created(client, *lines, window="1h"), "in_progress", done=1)
        clock.now_s += 3599
        assert client.batches.retrieve(batch.id).status == "in_progress"
        clock.now_s += 2
        done = until(client, batch, "expired")
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 20)
        assert {line["error"]["code"] for line in lines_of(client, done.error_file_id)} == {"batch_expired"}
        assert texts(client, done) == ["quick: 0 1 2 3"]
        assert not engine.at_work
        assert events(gateway, batch.id)[-1] == "expired"


def test_results_are_kept_for_their_lifetime(tmp_path: Path, clock: Clock) -> None:
    with faked(tmp_path) as (gateway, _):
        client = gateway.client()
        kept = {"anchor": "created_at", "seconds": 3600}
        batch = until(client, created(client, prompt_line("a", "x"), output_expires_after=kept), "completed")
        assert client.files.content(batch.output_file_id).content
        clock.now_s += 3600
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.output_file_id)
        assert client.batches.retrieve(batch.id).status == "completed"


@pytest.mark.usefixtures("clock")
def test_a_file_in_use_cannot_be_deleted(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _):
        client = gateway.client()
        batch = created(client, prompt_line("a", "slow"))
        with pytest.raises(openai.ConflictError) as caught:
            client.files.delete(batch.input_file_id)
        assert batch.id in caught.value.message
        client.batches.cancel(batch.id)
        until(client, batch, "cancelled")
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)


@pytest.mark.usefixtures("clock")
def test_a_backend_that_dies_is_drained_to_the_next(tmp_path: Path) -> None:
    with faked(tmp_path, lambda: [("one", FakeEngine()), ("two", FakeEngine())]) as (gateway, (one, two)):
        client = gateway.client()
        open_gate(gateway, two)
        quick = [prompt_line(f"q{n}", f"quick {n}", priority=9) for n in range(4)]
        lines = [*quick, *(prompt_line(f"s{n}", f"gated {n}") for n in range(16))]
        batch = until(client, created(client, *lines), "in_progress", done=4)

        async def die() -> None:
            one.die("the fake engine was killed by SIGKILL")

        gateway.call(die())
        done = until(client, batch, "completed")
        assert done.request_counts.completed == 20
        assert two.seen.streams
        with StoreReader(tmp_path / "batches") as reader:
            assert reader.named(batch.id).totals.computed == 20


@pytest.mark.usefixtures("clock")
def test_each_backend_works_on_its_own(tmp_path: Path) -> None:
    with faked(tmp_path, lambda: [("one", FakeEngine()), ("two", FakeEngine())]) as (gateway, (one, two)):
        client = gateway.client()

        def lines(model: str) -> list[str]:
            own = (prompt_line(f"o{n}", f"steady {n} of {model}", model=model) for n in range(8))
            return [prompt_line("same", "slow", model=model), *own]

        first = until(client, created(client, *lines("one")), "in_progress", done=1)
        comes_true(lambda: "slow" in one.at_work)
        second = until(client, created(client, *lines("two")), "in_progress", done=8)
        assert "slow" not in two.seen.streams  # the model is the same: its answer is waited for
        client.batches.cancel(first.id)
        until(client, first, "cancelled")
        comes_true(lambda: "slow" in two.at_work)  # and computed when it does not come
        assert all("of one" in prompt or prompt == "slow" for prompt in one.seen.streams)
        assert all("of two" in prompt or prompt == "slow" for prompt in two.seen.streams)
        client.batches.cancel(second.id)
        assert until(client, second, "cancelled").request_counts.completed == 8


@pytest.mark.usefixtures("clock")
def test_an_engine_that_works_in_order_is_entered_through_its_gate(tmp_path: Path) -> None:
    with faked(tmp_path, lambda: [("fake", InOrder(slots=2))], queue=1) as (gateway, (engine,)):
        client = gateway.client()
        lines = [prompt_line(f"s{n}", f"steady {n}") for n in range(12)]
        batch = until(client, created(client, *lines), "in_progress", done=1)
        asked = patient.post(f"{gateway.url}/v1/completions", json={"prompt": "chat"}, timeout=LIMIT_S)
        assert asked.status_code == 200
        assert until(client, batch, "completed").request_counts.completed == 12
        assert engine.seen.most_at_once <= 2


@pytest.mark.usefixtures("clock")
def test_stopping_puts_back_and_starting_goes_on(tmp_path: Path) -> None:
    prompts = ["quick", "gated 1", "gated 2", "another"]
    lines = [prompt_line(f"s{n}", prompt) for n, prompt in enumerate(prompts)]
    with faked(tmp_path, grace_s=0.0) as (gateway, (engine,)):
        batch = until(gateway.client(), created(gateway.client(), *lines), "in_progress", done=2)
        assert engine.at_work == {"gated 1", "gated 2"}
    with StoreReader(tmp_path / "batches") as reader:
        counts = reader.named(batch.id).counts
        assert (counts.running, counts.pending, counts.done) == (0, 2, 2)
    with faked(tmp_path) as (gateway, (engine,)):
        open_gate(gateway, engine)
        client = gateway.client()
        done = until(client, client.batches.retrieve(batch.id), "completed")
        assert texts(client, done) == [f"{prompt}: 0 1 2 3" for prompt in prompts]
        assert done.usage.output_tokens == 4 * 4  # each answer once
        assert sorted(engine.seen.streams) == ["gated 1", "gated 2"]


@pytest.mark.usefixtures("clock")
def test_while_a_run_has_the_store_batches_wait(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _):
        client = gateway.client()
        with Store(tmp_path / "batches"):
            batch = created(client, prompt_line("a", "x"))
            comes_true(lambda: any(line.get("event") == "batches_wait" for line in gateway.lines))
            assert client.batches.retrieve(batch.id).status == "validating"
        until(client, batch, "completed")
        comes_true(lambda: _free(tmp_path / "batches"))  # and a run can have it again


def _free(folder: Path) -> bool:
    try:
        Store(folder).close()
    except Exception:  # noqa: BLE001  whatever keeps it from being had
        return False
    return True


@pytest.mark.usefixtures("clock")
def test_the_command_line_can_cancel_it(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, (engine,)):
        client = gateway.client()
        batch = until(client, created(client, prompt_line("a", "slow"), prompt_line("b", "b")), "in_progress", done=1)
        ask_to_cancel(tmp_path / "batches", batch.id)
        done = until(client, batch, "cancelled")
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        assert not engine.at_work


@pytest.mark.usefixtures("clock")
def test_jobs_that_were_removed_are_stored_again(tmp_path: Path) -> None:
    with faked(tmp_path, grace_s=0.0) as (gateway, _):
        client = gateway.client()
        batch = until(client, created(client, prompt_line("a", "slow"), prompt_line("b", "b")), "in_progress", done=1)
    with Store(tmp_path / "batches") as store:
        store.submissions.forget(store.named(batch.id).id)
    with faked(tmp_path) as (gateway, _):
        client = gateway.client()
        until(client, client.batches.retrieve(batch.id), "in_progress", done=1)
        client.batches.cancel(batch.id)
        until(client, batch, "cancelled")


@pytest.mark.usefixtures("clock")
def test_visibility_by_key(tmp_path: Path) -> None:
    secrets = {name: keys.add(tmp_path, name) for name in ("eva", "adam")}
    with faked(tmp_path) as (gateway, _):
        eva, adam = (gateway.client(secrets[name]) for name in ("eva", "adam"))
        batch = until(eva, created(eva, prompt_line("a", "x")), "completed")
        assert [each.id for each in adam.batches.list()] == []
        assert [each.id for each in adam.files.list()] == []
        assert len(list(eva.files.list())) == 2
        asks: tuple[Callable[[], Any], ...] = (
            lambda: adam.batches.retrieve(batch.id),
            lambda: adam.batches.cancel(batch.id),
            lambda: adam.files.content(batch.output_file_id),
            lambda: adam.files.delete(batch.input_file_id),
            lambda: adam.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        )
        for ask in asks:
            with pytest.raises(openai.NotFoundError):
                ask()
        with pytest.raises(openai.AuthenticationError):
            gateway.client("wrong").files.list()


@pytest.mark.usefixtures("clock")
def test_files_that_are_too_large(tmp_path: Path) -> None:
    with faked(tmp_path, max_file_bytes=1000) as (gateway, _):
        client = gateway.client()
        with pytest.raises(openai.APIStatusError) as caught:
            uploaded(client, "x" * 1001)
        assert caught.value.status_code == 413
        assert uploaded(client, "x" * 1000).bytes == 1000
        left = [path for path in (tmp_path / "batches" / "files").iterdir() if path.name.startswith(".")]
        assert left == []


@pytest.mark.usefixtures("clock")
def test_many_uploads_at_once(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _):
        made: list[str] = []

        def upload(number: int) -> None:
            made.append(uploaded(gateway.client(), f"{number}" * 5000).id)

        threads = [threading.Thread(target=upload, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert len(set(made)) == 8
        assert {file.id for file in gateway.client().files.list()} == set(made)


@pytest.mark.usefixtures("clock")
def test_text_that_is_none(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _):
        client = gateway.client()
        lines = [prompt_line("a", "\ud800"), prompt_line("b\ud800", "x"), prompt_line("c", "x", **{"\ud800": 1})]
        lines.append(prompt_line("d", "x", temperature="\ud800"))
        done = until(client, created(client, *lines, prompt_line("é", "é")), "completed")
        assert [line["custom_id"] for line in lines_of(client, done.output_file_id)] == ["é"]
        assert [line["error"]["code"] for line in lines_of(client, done.error_file_id)] == ["invalid_line"] * 4
        refused = until(client, created(client, prompt_line("a", "x").replace("v1", r"\ud800")), "failed")
        assert refused.errors.data[0].code == "mismatched_endpoint"


@pytest.mark.usefixtures("clock")
def test_results_that_cannot_be_written_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, tried = write_results, threading.Event()

    def full(files: FileStore, reader: StoreReader, jobs: Batch, batch: HttpBatch, *, now_s: float) -> None:
        write(files, reader, jobs, batch, now_s=now_s)  # half of it is done, and done again
        tried.set()
        raise StoreFull("no room is left")

    monkeypatch.setattr(runner, "write_results", full)
    with faked(tmp_path) as (gateway, _):
        client = gateway.client()
        batch = until(client, created(client, prompt_line("a", "x"), prompt_line("b", "long")), "finalizing")
        assert tried.wait(LIMIT_S)
        comes_true(lambda: any(line.get("event") == "batch_waits" for line in gateway.lines))
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
    monkeypatch.setattr(runner, "write_results", write)
    with faked(tmp_path) as (gateway, (engine,)):
        client = gateway.client()
        done = until(client, client.batches.retrieve(batch.id), "completed")
        assert texts(client, done) == ["x: 0 1 2 3"]
        assert lines_of(client, done.error_file_id)[0]["error"]["code"] == "too_long"
        assert not engine.seen.streams
        assert len(list(client.files.list())) == 3
