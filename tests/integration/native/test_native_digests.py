"""Digests of a real native engine: computed and saved once, loaded after a restart, pinned again after a crash."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from support.native_engine import chat, native, plan_for, run
from tokenmill.config import EngineConfig
from tokenmill.engine.engine import answer
from tokenmill.engine.pinned_prefixes import PinnedPrefix, PinReport, pin_prefixes, read_digest, saved_at
from tokenmill.errors import UsageError
from tokenmill.native.launching import adopt, launch_engine

DIGEST = "You are a careful mill that grinds words into flour. " * 12
OTHER = "You are a careful mill that grinds nothing at all, and rests. " * 6


@pytest.fixture
def digests(tmp_path: Path) -> list[PinnedPrefix]:
    for name, text in (("digest.md", DIGEST), ("other.md", OTHER)):
        (tmp_path / name).write_text(text)
    return [read_digest(tmp_path / "digest.md"), read_digest(tmp_path / "other.md")]


def test_prefixes_are_computed_and_saved_once_and_read_back_at_the_next_start(
    smollm2_path: Path, tmp_path: Path, digests: list[PinnedPrefix]
) -> None:
    folder = tmp_path / "heads"

    async def start() -> tuple[PinReport, int | None]:
        async with native(smollm2_path, tmp_path) as engine:
            held = await pin_prefixes(engine, digests, folder)
            return held, (await answer(engine, chat("What grinds?", system=DIGEST, tokens=1))).usage.cached_tokens

    first, reused = run(start)
    assert ([head.how for head in first.prefixes], first.notes) == (["computed", "computed"], ())
    files = {head.saved for head in first.prefixes}
    assert files == set(folder.iterdir())
    assert reused == first.prefixes[0].prompt_tokens
    again, reused = run(start)
    assert ([head.how for head in again.prefixes], again.notes) == (["restored", "restored"], ())
    assert {head.saved for head in again.prefixes} == files
    assert all(head.reused_tokens == head.prompt_tokens for head in again.prefixes)
    assert reused == again.prefixes[0].prompt_tokens


def test_a_prefix_that_cannot_be_used_is_computed_again_and_one_too_long_leaves_the_engine_up(
    smollm2_path: Path, tmp_path: Path, digests: list[PinnedPrefix]
) -> None:
    folder = tmp_path / "heads"

    async def scene() -> None:
        async with native(smollm2_path, tmp_path) as engine:
            path = saved_at(folder, digests[0], engine.identity.model_id)
            path.parent.mkdir()
            path.write_bytes(b"not a head at all, but long enough to be read as one")
            mended = await pin_prefixes(engine, digests[:1], folder)
            assert mended.prefixes[0].how == "computed"
            assert "is recomputed" in mended.notes[0]
            assert (await pin_prefixes(engine, digests[:1], folder)).prefixes[0].how == "restored"
            await engine.set_context(cache_type_k="q8_0", cache_type_v="q8_0")
            other = await pin_prefixes(engine, digests[:1], folder)
            assert other.prefixes[0].how == "computed"
            assert "cache_type_k" in other.notes[0]
            long = replace(digests[0], name="long.md", prompt=DIGEST * 20)
            refused = await pin_prefixes(engine, [long, digests[1]], folder)
            assert [head.how for head in refused.prefixes] == ["failed", "computed"]
            assert "long.md" in refused.notes[0]
            blocked = await pin_prefixes(engine, [replace(digests[0], prompt=OTHER)], tmp_path / "digest.md" / "heads")
            assert blocked.prefixes[0].saved is None
            assert "not saved" in blocked.notes[0]

    run(scene)


def test_an_engine_that_was_started_again_holds_its_digests(
    smollm2_path: Path, tmp_path: Path, digests: list[PinnedPrefix]
) -> None:
    async def scene() -> None:
        up = await launch_engine(
            plan_for(smollm2_path),
            model_path=smollm2_path,
            config=EngineConfig(warm=False),
            state=tmp_path,
            name="d",
            prefixes=digests,
            prefixes_dir=tmp_path / "heads",
        )
        restarting = up.engine
        try:
            assert up.warmth is not None
            assert [head.how for head in up.warmth.prefixes] == ["computed", "computed"]
            assert restarting.identity.pid is not None
            os.kill(restarting.identity.pid, signal.SIGKILL)
            while restarting.generation == 0:
                await asyncio.sleep(0.01)
            said = await answer(restarting, chat("What grinds?", system=DIGEST, tokens=1))
            assert said.usage.cached_tokens == up.warmth.prefixes[0].prompt_tokens
            other = await adopt(tmp_path, "d")
            assert other is not None
            counters = (await other.status()).counters
            assert counters.cells_used is not None, "known from the first moment on"
            assert counters.cells_used >= up.warmth.prefixes[0].prompt_tokens
            await other.close()
        finally:
            await restarting.close()

    run(scene)


@pytest.mark.parametrize(("data", "word"), [(None, "cannot read"), (b"\xff\xfe\x00", "UTF-8"), (b" \n", "empty")])
def test_a_digest_must_be_text(data: bytes | None, word: str, tmp_path: Path) -> None:
    path = tmp_path / "digest.md"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError, match=word):
        read_digest(path)
