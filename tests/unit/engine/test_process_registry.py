"""Records of running engines: written atomically, removed when the process exits, one lock per name."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.engine.process import registry
from tokenmill.engine.process.identity import Pid
from tokenmill.engine.process.registry import Record
from tokenmill.errors import EngineError, UsageError


def living() -> Pid:
    me = Pid.of(os.getpid())
    assert me is not None
    return me


def record(name: str = "a", engine: Pid | None = None) -> Record:
    pid = engine or living()
    return Record(
        name, "llama-server", pid, pid, "http://127.0.0.1:1", "m", "id", "b1", ("x", "--y"), 1.5, "/log", False, 7
    )


def test_written_and_read(tmp_path: Path) -> None:
    registry.write(tmp_path, record())
    assert registry.read(tmp_path, "a") == record()
    assert registry.listed(tmp_path) == (record(),)
    assert [path.name for path in (tmp_path / "engines/a").iterdir()] == ["engine.json"]


def test_a_number_that_is_another_process_counts_for_nothing(tmp_path: Path) -> None:
    me = living()
    gone = record("gone", Pid(me.pid, me.ticks - 1, me.boot))
    registry.write(tmp_path, gone)
    registry.write(tmp_path, record("here"))
    assert not gone.alive
    assert registry.listed(tmp_path) == (record("here"),)
    assert registry.read(tmp_path, "gone") is None, "and its record is removed"


def test_only_ones_own_record_is_forgotten(tmp_path: Path) -> None:
    registry.write(tmp_path, record())
    registry.forget(tmp_path, replace(record(), started=0.0))
    assert registry.read(tmp_path, "a") is not None
    registry.forget(tmp_path, record())
    assert registry.read(tmp_path, "a") is None
    registry.forget(tmp_path, record())


@pytest.mark.parametrize("change", [{"kind": "other"}, {"name": "b"}, {"engine": 5}, {"argv": None}, {"more": 1}])
def test_damaged_records_are_none(tmp_path: Path, change: dict[str, object]) -> None:
    registry.write(tmp_path, record())
    path = tmp_path / "engines/a/engine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert registry.read(tmp_path, "a") is None
    path.write_text("{")
    assert registry.read(tmp_path, "a") is None


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101, "a b"])
def test_names_that_are_no_folders(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        registry.folder(tmp_path, name)


def test_no_engines_yet(tmp_path: Path) -> None:
    assert registry.listed(tmp_path) == ()
    assert registry.read(tmp_path, "a") is None
    (tmp_path / "engines/.odd").mkdir(parents=True)
    assert registry.listed(tmp_path) == ()


def test_two_do_not_hold_one_name(tmp_path: Path) -> None:
    async def scene() -> None:
        async with registry.locked(tmp_path, "a"):
            with pytest.raises(EngineError, match=f"process {os.getpid()}"):
                async with registry.locked(tmp_path, "a"):
                    pass
            async with registry.locked(tmp_path, "b"):
                pass
        async with registry.locked(tmp_path, "a"):
            pass

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_who_waits_gets_it(tmp_path: Path) -> None:
    async def scene() -> None:
        held = asyncio.Event()
        order: list[str] = []

        async def first() -> None:
            async with registry.locked(tmp_path, "a"):
                held.set()
                await asyncio.sleep(0)
                order.append("first")

        task = asyncio.create_task(first())
        await held.wait()
        async with registry.locked(tmp_path, "a", wait_s=5):
            order.append("second")
        await task
        assert order == ["first", "second"]

    asyncio.run(asyncio.wait_for(scene(), 10))
