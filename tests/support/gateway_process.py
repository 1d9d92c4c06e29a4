"""A gateway in a separate process, to be killed.

gateway_process.py FOLDER MODEL      prints its URL, and serves until stdin is closed
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

LIMIT_S = 120.0


@contextmanager
def started(folder: Path, model: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """One with its state in a folder, and where it answers; ends with the block."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http")
        yield process, url
    finally:
        process.stdin.close()
        try:
            process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


async def live(folder: Path, model: Path) -> None:
    from support.native_engine import plan_for
    from tokenmill.config import Config, EngineConfig, GatewayConfig
    from tokenmill.gateway.http.listening import bind
    from tokenmill.gateway.serving import EngineSpec, serve, started_engines, state_for

    config = Config(state_dir=str(folder), gateway=GatewayConfig(port=0, log="off"))
    plan, engine = plan_for(model, context=512, sequences=2), replace(EngineConfig(), warm=False)
    stop = asyncio.Event()
    ends = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    ends.add_done_callback(lambda _: stop.set())
    async with started_engines([EngineSpec("here", ("smollm2",), engine, plan, model)], config) as (engines, ups):
        state = state_for(config, engines, ups)
        with bind(config.gateway) as listening:
            await serve(state, listening, stop=stop, ready=lambda: print(state.url, flush=True))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    asyncio.run(live(Path(sys.argv[1]), Path(sys.argv[2])))
