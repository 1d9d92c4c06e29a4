"""A native worker that dies, hangs or cannot start: the fault is reported, and other requests are not affected."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from support.native_engine import chat, interactive, native, plan_for, run
from tokenmill.config import EngineConfig
from tokenmill.engine import restart
from tokenmill.engine.engine import answer
from tokenmill.engine.process import registry
from tokenmill.errors import EngineDied, EngineError, RequestRefused
from tokenmill.model.gguf import read_header
from tokenmill.native.client import NativeEngine
from tokenmill.native.launching import adopt, start_restarting

ENDLESS = replace(chat("Count for ever.", tokens=900), ignore_eos=True)


def pid_of(engine: NativeEngine) -> int:
    assert engine.identity.pid is not None
    return engine.identity.pid


def liveness(engine: NativeEngine) -> str:
    return engine.liveness


def test_killed_workers_are_noticed_and_another_goes_on(smollm2_path: Path, tmp_path: Path) -> None:
    async def dies(dying: NativeEngine, number: signal.Signals) -> None:
        streams = [dying.stream(ENDLESS) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        os.kill(pid_of(dying), number)
        for stream in streams:
            with pytest.raises(EngineDied, match=number.name) as caught:
                async for _ in stream:
                    pass
        assert "engine.log" in (caught.value.hint or "")
        with pytest.raises(EngineDied):
            await answer(dying, chat("Hello?"))
        assert (await dying.status()).state == "failed"

    async def work() -> None:
        async with (
            native(smollm2_path, tmp_path) as first,
            native(smollm2_path, tmp_path, name="second") as second,
            native(smollm2_path, tmp_path, name="other") as other,
        ):
            beside = asyncio.create_task(answer(other, chat("Hello?", tokens=40)))
            await asyncio.gather(dies(first, signal.SIGKILL), dies(second, signal.SIGSEGV))
            assert (await beside).text

    run(work)


def test_an_endless_step_and_a_silent_worker_are_reported_and_killed_at_their_limit(
    smollm2_path: Path, tmp_path: Path
) -> None:
    limited = EngineConfig(step_limit_s=5.0)

    async def stopped_in_a_step() -> None:
        async with native(smollm2_path, tmp_path, config=limited, name="step") as engine:
            stream = engine.stream(ENDLESS)
            await anext(stream)
            while engine.heartbeat.step_age_s is None:
                await asyncio.sleep(0.01)
            os.kill(pid_of(engine), signal.SIGSTOP)
            with pytest.raises(EngineDied, match="hung: a step"):
                async for _ in stream:
                    pass

    async def stopped_idle() -> None:
        async with native(smollm2_path, tmp_path, config=limited, name="idle") as engine:
            os.kill(pid_of(engine), signal.SIGSTOP)
            waiting = asyncio.create_task(answer(engine, chat("Hello?")))
            while (await engine.status()).state == "ready":
                await asyncio.sleep(0.05)
            assert engine.liveness in ("unresponsive", "failed")  # with this limit, it is killed when it is noticed
            with pytest.raises(EngineDied, match="hung: no heartbeat"):
                await waiting

    async def work() -> None:
        await asyncio.gather(stopped_in_a_step(), stopped_idle())

    run(work)


def test_a_stopped_worker_is_unresponsive_within_seconds_and_continues(smollm2_path: Path, tmp_path: Path) -> None:
    """Interactive requests fail within seconds, a batch request waits, and both work once the worker continues."""

    async def work() -> None:
        async with native(smollm2_path, tmp_path, config=EngineConfig(step_limit_s=120.0)) as engine:
            before = await answer(engine, chat("Hello?"))
            os.kill(pid_of(engine), signal.SIGSTOP)
            began_s = asyncio.get_running_loop().time()
            batch = asyncio.create_task(answer(engine, chat("Hello?")))
            with pytest.raises(EngineDied) as caught:
                await answer(engine, interactive(chat("Hello?")))
            assert caught.value.code == "engine_unresponsive"
            assert asyncio.get_running_loop().time() - began_s < 15.0
            assert liveness(engine) == "unresponsive"
            with pytest.raises(EngineDied):  # immediately
                await answer(engine, interactive(chat("Hello?")))
            os.kill(pid_of(engine), signal.SIGCONT)
            assert (await batch).text == before.text
            while liveness(engine) != "up":
                await asyncio.sleep(0.05)
            assert (await answer(engine, interactive(chat("Hello?")))).text == before.text
            assert engine.last_error is None

    run(work)


def test_the_time_in_which_we_did_not_run_is_not_its_silence(smollm2_path: Path, tmp_path: Path) -> None:
    """Stopped with Ctrl-Z for an hour, we have heard nothing; what it said lies in the socket."""

    async def work() -> None:
        async with native(smollm2_path, tmp_path) as engine:
            loop = asyncio.get_running_loop()
            time, absent_s = loop.time, 3600.0
            loop.time = lambda: time() + absent_s  # type: ignore[method-assign]
            before = engine.heartbeat
            while engine.heartbeat is before and not engine.ended.done():
                await asyncio.sleep(0.01)
            assert (await answer(engine, chat("Hello?"))).text
            assert (await engine.status()).state == "ready"

    asyncio.run(work())


def test_it_is_started_again_and_its_work_can_be_sent_again(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "delay_s", lambda *_: 0.0)

    async def work() -> None:
        plan = plan_for(smollm2_path)
        engine = await start_restarting(
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
        assert not registry.listed(tmp_path)

    run(work)


def test_one_that_was_left_running_is_found_again_and_can_be_stopped(smollm2_path: Path, tmp_path: Path) -> None:
    from tokenmill.native.launching import start

    async def work() -> None:
        left = await start(
            plan_for(smollm2_path),
            model_path=smollm2_path,
            config=EngineConfig(),
            state=tmp_path,
            name="night",
            detach=True,
        )
        pid = left.identity.pid
        await left.close()
        found = await adopt(tmp_path, "night")
        assert isinstance(found, NativeEngine)
        assert found.identity.pid == pid
        assert (await answer(found, chat("Hello?"))).text
        await found.stop()
        (record,) = (registry.read(tmp_path, "night"),)
        while record is not None and record.alive:
            await asyncio.sleep(0.02)
        assert not registry.listed(tmp_path)

    run(work)


def test_a_model_that_cannot_be_loaded_is_an_error_with_llama_cpps_words(smollm2_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2_path.read_bytes().replace(b"blk.7.attn_k.weight", b"blk.7.attn_x.weight"))

    async def work() -> None:
        with pytest.raises(EngineError, match=r"broken\.gguf.*attn_k.weight"):
            async with native(broken, tmp_path, plan=plan_for(smollm2_path)):
                pass

    run(work)


def test_a_chat_template_that_loops_ends_its_request_and_nothing_else(smollm2_path: Path, tmp_path: Path) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    hostile = "{% if 'attack' in messages[-1].content %}" + loop + "{% endif %}{{ messages[-1].content }}"
    template = str(read_header(smollm2_path).keys["tokenizer.chat_template"])
    model = tmp_path / "hostile.gguf"
    model.write_bytes(smollm2_path.read_bytes().replace(template.encode(), hostile.ljust(len(template)).encode()))

    async def work() -> None:
        async with native(model, tmp_path) as engine:
            running = asyncio.create_task(answer(engine, replace(ENDLESS, prompt="Count for ever.", max_tokens=200)))
            with pytest.raises(RequestRefused) as refused:
                await answer(engine, chat("attack"))
            assert refused.value.code == "chat_template_stopped"
            assert (await answer(engine, chat("Hello?"))).text
            assert (await running).text

    run(work)
