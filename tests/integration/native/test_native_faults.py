"""What happens when a native worker dies, hangs or cannot start: noticed, named, and nobody else is hurt."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from support.native_engine import chat, native, plan_for, run
from tokenmill.config import EngineConfig
from tokenmill.engine import records
from tokenmill.engine.engine import answer
from tokenmill.engine.native.engine import NativeEngine
from tokenmill.engine.start import adopt, start_watched
from tokenmill.errors import EngineDied, EngineError

ENDLESS = replace(chat("Count for ever.", tokens=900), ignore_eos=True)


def pid_of(engine: NativeEngine) -> int:
    assert engine.identity.pid is not None
    return engine.identity.pid


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
def test_a_killed_worker_is_noticed_within_a_second_and_another_goes_on(
    number: signal.Signals, words: str, smollm2_path: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        async with native(smollm2_path, tmp_path) as dying, native(smollm2_path, tmp_path, name="other") as other:
            streams = [dying.stream(ENDLESS) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            beside = asyncio.create_task(answer(other, chat("Hello?", tokens=40)))
            loop = asyncio.get_running_loop()
            killed_s = loop.time()
            os.kill(pid_of(dying), number)
            for stream in streams:
                with pytest.raises(EngineDied, match=words) as caught:
                    async for _ in stream:
                        pass
            assert loop.time() - killed_s < 1.0
            assert "engine.log" in (caught.value.hint or "")
            with pytest.raises(EngineDied):
                await answer(dying, chat("Hello?"))
            assert (await dying.status()).state == "failed"
            assert (await beside).text

    run(work)


def test_a_step_that_takes_too_long_is_a_hang(smollm2_path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        plan = plan_for(smollm2_path, context=8192, sequences=1, ubatch=4096)
        config = EngineConfig(step_limit_s=0.2)
        async with native(smollm2_path, tmp_path, plan=plan, config=config) as engine:
            with pytest.raises(EngineDied, match="hung: a step"):
                await answer(engine, chat("word " * 6000))

    run(work)


def test_a_silent_worker_is_told_of_at_once_and_killed_at_its_limit(smollm2_path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with native(smollm2_path, tmp_path, config=EngineConfig(step_limit_s=3.0)) as engine:
            os.kill(pid_of(engine), signal.SIGSTOP)
            waiting = asyncio.create_task(answer(engine, chat("Hello?")))
            while (await engine.status()).detail is None:
                await asyncio.sleep(0.05)
            assert "has not been heard of" in ((await engine.status()).detail or "")
            with pytest.raises(EngineDied, match="hung"):
                await waiting

    run(work)


def test_it_is_started_again_and_its_work_can_be_sent_again(smollm2_path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        plan = plan_for(smollm2_path)
        engine = await start_watched(
            plan, model_path=smollm2_path, config=EngineConfig(), state=tmp_path, name="watched"
        )
        try:
            before = await answer(engine, chat("Hello?"))
            first = engine.identity.pid
            assert first is not None
            stream = engine.stream(ENDLESS)
            await anext(stream)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EngineDied):
                async for _ in stream:
                    pass
            after = await answer(engine, chat("Hello?"))
            assert after.text == before.text
            assert engine.identity.pid != first
            assert (await engine.status()).counters.restarts == 1
        finally:
            await engine.close()
        assert not records.listed(tmp_path)

    run(work)


def test_one_that_was_left_running_is_found_again_and_can_be_stopped(smollm2_path: Path, tmp_path: Path) -> None:
    from tokenmill.engine.start import start

    async def work() -> None:
        left = await start(
            plan_for(smollm2_path), model_path=smollm2_path, config=EngineConfig(), state=tmp_path, name="night",
            detach=True,
        )  # fmt: skip
        pid = left.identity.pid
        await left.close()
        found = await adopt(tmp_path, "night")
        assert isinstance(found, NativeEngine)
        assert found.identity.pid == pid
        assert (await answer(found, chat("Hello?"))).text
        await found.stop()
        (record,) = (records.read(tmp_path, "night"),)
        while record is not None and record.alive:
            await asyncio.sleep(0.02)
        assert not records.listed(tmp_path)

    run(work)


def test_a_model_that_cannot_be_loaded_is_an_error_with_llama_cpps_words(smollm2_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2_path.read_bytes().replace(b"blk.7.attn_k.weight", b"blk.7.attn_x.weight"))

    async def work() -> None:
        with pytest.raises(EngineError, match=r"broken\.gguf.*attn_k.weight"):
            async with native(broken, tmp_path, plan=plan_for(smollm2_path)):
                pass

    run(work)
