"""Life cycle of the llama-server of the wheel: killed, adopted, cancelled, failed; no process is left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers import EMBEDDED, run, small_plan, until
from support.tiny_models import write_moe
from tokenmill.engine import restart
from tokenmill.engine.engine import Chat, Request, Sampling, answer
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.pinned_prefixes import PinnedPrefix, pin_prefixes
from tokenmill.engine.process import registry
from tokenmill.engine.process.identity import Pid
from tokenmill.engine.server import client
from tokenmill.engine.server.client import ServerEngine
from tokenmill.errors import EngineDied, EngineError
from tokenmill.native.launching import adopt, start, start_restarting

GREEDY = Sampling(temperature=0.0)


def test_killed_it_is_noticed_and_comes_back(
    tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "delay_s", lambda *_: 0.0)

    async def scene() -> None:
        engine = await start_restarting(
            small_plan(smollm2_path), model_path=smollm2_path, config=EMBEDDED, state=tmp_path, name="a"
        )
        streaming = asyncio.Event()

        async def long() -> None:
            try:
                async for _ in engine.stream(Request("Once upon a time", max_tokens=480, ignore_eos=True)):
                    streaming.set()
            except EngineDied as died:
                assert "SIGKILL" in died.message
                assert "engine.log" in (died.hint or "")
                return
            raise AssertionError("it went on")

        streams = [asyncio.create_task(long()) for _ in range(2)]
        await streaming.wait()
        first = engine.identity.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await asyncio.gather(*streams)
        assert (await answer(engine, Request("Once", GREEDY, max_tokens=1))).usage.completion_tokens == 1
        assert engine.identity.pid != first
        assert (await engine.status()).counters.restarts == 1
        [record] = registry.listed(tmp_path)
        assert record.engine.pid == engine.identity.pid
        await engine.close()
        assert not record.engine.alive
        assert not record.supervisor.alive
        assert registry.listed(tmp_path) == ()

    run(scene)


def test_stopped_it_is_unresponsive_and_comes_back(
    tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "delay_s", lambda *_: 0.0)
    monkeypatch.setattr(client, "UNRESPONSIVE_S", 1.0)
    monkeypatch.setattr(client, "SILENT_KILL_S", 8.0)

    async def scene() -> None:
        engine = await start_restarting(
            small_plan(smollm2_path), model_path=smollm2_path, config=EMBEDDED, state=tmp_path, name="a"
        )
        first = engine.identity.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        while engine.liveness == "up":
            await asyncio.sleep(0.05)
        assert engine.liveness == "unresponsive"
        assert engine.last_error is not None
        assert engine.last_error.code == "engine_unresponsive"
        with pytest.raises(EngineDied, match="has not answered /health"):
            await answer(engine, Request("Once", GREEDY, max_tokens=1))
        assert (await answer(engine, Request("Once", GREEDY, max_tokens=1))).usage.completion_tokens == 1
        assert engine.identity.pid != first
        await engine.close()

    run(scene)


STARTER = """
import asyncio, sys
from pathlib import Path
from support.servers import EMBEDDED, small_plan
from tokenmill.native.launching import start

async def main():
    model, state = Path(sys.argv[1]), Path(sys.argv[2])
    await start(small_plan(model), model_path=model, config=EMBEDDED, state=state, name="a", detach=sys.argv[3] == "detach")
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def started(model: Path, state: Path, how: str) -> registry.Record:
    """An engine whose parent process was killed."""
    path = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(model), str(state), how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"ready\n"
        record = registry.read(state, "a")
        assert record is not None
        starter.kill()
    return record


def test_one_that_survived_its_starter_is_adopted(tmp_path: Path, smollm2_path: Path) -> None:
    record = started(smollm2_path, tmp_path, "detach")

    async def scene() -> None:
        assert record.alive
        engine = await adopt(tmp_path, "a")
        assert isinstance(engine, ServerEngine)
        assert (await answer(engine, Request("Once", GREEDY, max_tokens=1))).usage.completion_tokens == 1
        await engine.stop()
        assert not record.engine.alive
        assert await adopt(tmp_path, "a") is None
        assert await adopt(tmp_path, "never") is None

    run(scene)


def test_one_that_was_not_to_survive_does_not(tmp_path: Path, smollm2_path: Path) -> None:
    record = started(smollm2_path, tmp_path, "tied")

    async def over() -> bool:
        return not record.engine.alive and not record.supervisor.alive

    run(lambda: until(over))


def test_a_digest_is_in_every_slot_and_read_back_at_the_next_start(tmp_path: Path) -> None:
    model = write_moe(tmp_path)
    system = {"role": "system", "content": "You grind wheat into flour. " * 8}
    slots = registry.slots_path(tmp_path, "a")

    async def life(how: str) -> None:
        engine = await start(small_plan(model), model_path=model, config=EMBEDDED, state=tmp_path, name="a")
        held = await pin_prefixes(engine, [PinnedPrefix("rules", Chat((system,)))], slots=slots)
        assert ([head.how for head in held.prefixes], held.notes) == ([how], ())
        for lane in range(2):
            asked = Request(Chat((system, {"role": "user", "content": "Why?"})), GREEDY, max_tokens=1, slot=lane)
            usage = (await answer(engine, asked)).usage
            assert usage.cached_tokens is not None
            assert usage.cached_tokens > 0.8 * usage.prompt_tokens
        await engine.close()

    async def scene() -> None:
        await life("computed")
        await life("restored")
        [saved] = slots.iterdir()
        saved.write_bytes(b"no slot")
        engine = await start(
            small_plan(model, sequences=1), model_path=model, config=EMBEDDED, state=tmp_path, name="a"
        )
        two = [
            PinnedPrefix("rules", Chat((system,))),
            PinnedPrefix("more", Chat(({"role": "system", "content": "Rest."},))),
        ]
        held = await pin_prefixes(engine, two, slots=slots)
        assert [head.how for head in held.prefixes] == ["computed", "failed"]
        assert "rules is recomputed" in held.notes[0]
        assert "more digests than slots" in held.notes[1]
        await engine.close()

    run(scene)


def test_a_start_that_fails_says_why(tmp_path: Path, smollm2_path: Path) -> None:
    async def scene() -> None:
        plan = small_plan(smollm2_path)
        plan = replace(plan, settings=replace(plan.settings, cache_type_v="q8_0", flash_attention=False))
        with pytest.raises(EngineError, match="while loading") as failed:
            await start(plan, model_path=smollm2_path, config=EMBEDDED, state=tmp_path, name="a")
        assert str(tmp_path / "engines/a/engine.log") in (failed.value.hint or "")
        assert registry.listed(tmp_path) == ()

    run(scene)


def test_a_taken_port_is_not_used_and_a_cancelled_load_leaves_nothing(tmp_path: Path, smollm2_path: Path) -> None:
    async def scene() -> None:
        seen: list[Pid] = []
        details: list[str] = []

        def look(progress: LoadProgress) -> None:
            details.append(progress.detail or "")
            record = registry.read(tmp_path, "a")
            if record is not None and not seen:
                assert record.address != f"http://127.0.0.1:{taken}"
                seen.extend((record.engine, record.supervisor))
                task.cancel()

        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            task = asyncio.create_task(
                start(
                    small_plan(smollm2_path),
                    model_path=smollm2_path,
                    config=replace(EMBEDDED, port=taken),
                    state=tmp_path,
                    name="a",
                    progress=look,
                )
            )
            with pytest.raises(asyncio.CancelledError):
                await task
        assert f"port {taken} is in use by process {os.getpid()}" in details[0]
        assert len(seen) == 2
        assert not [pid for pid in seen if pid.alive]
        assert registry.listed(tmp_path) == ()

    run(scene)
