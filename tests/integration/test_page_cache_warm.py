"""Warm-up of a real engine: the file is read before the start, both requests answer, a prefix is computed once."""

import asyncio
import os
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.page_cache import resident
from tokenmill.engine.pinned_prefixes import PinnedPrefix
from tokenmill.engine.warm import WarmProgress, WarmReport, fill_ahead, warm
from tokenmill.hardware.probe import probe
from tokenmill.model.read import read
from tokenmill.native.launching import start
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make

DIGEST = "You are a careful mill that grinds words into flour. " * 4


def test_a_native_engine_is_warm_before_it_is_ready(smollm2_path: Path, tmp_path: Path) -> None:
    plan = make(
        probe(smollm2_path),
        read(smollm2_path),
        Goal(context=512, sequences=1, threads=1, threads_batch=1, repack=False, mmap=True),
    )
    with smollm2_path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    seen: list[WarmProgress] = []

    async def warmed() -> tuple[WarmReport, WarmReport]:
        filled = await fill_ahead(plan, [smollm2_path], progress=seen.append)
        engine = await start(plan, model_path=smollm2_path, config=EngineConfig(), state=tmp_path, name="warm")
        try:
            head = PinnedPrefix("digest", DIGEST)
            once = await warm(engine, plan, [smollm2_path], prefixes=[head], progress=seen.append, filled=filled)
            return once, await warm(engine, plan, [smollm2_path], prefixes=[head])
        finally:
            await engine.close()

    first, again = asyncio.run(asyncio.wait_for(warmed(), 240))
    assert first.filled is not None
    assert first.filled.total_bytes == smollm2_path.stat().st_size
    few_bytes = smollm2_path.stat().st_size // 100  # a kernel that reclaims proactively may take back single pages
    cold_bytes = resident(smollm2_path).cold_bytes
    assert cold_bytes is not None
    assert cold_bytes <= few_bytes
    assert first.first is not None
    assert first.second is not None
    assert first.first.tokens == first.second.tokens == 8
    assert first.second.decode_tok_s
    assert first.cold_start.cold_s
    assert first.cold_start.cold_s >= first.first.seconds
    (computed,), (kept,) = first.prefixes, again.prefixes
    assert computed.reused_tokens == 0
    assert kept.prompt_tokens == computed.prompt_tokens
    assert kept.reused_tokens == computed.prompt_tokens
    assert [step.step for step in seen if step.step != "page cache"] == ["first decode", "first decode", "prefixes"]
    assert again.filled is not None
    assert again.filled.cold_bytes <= few_bytes
