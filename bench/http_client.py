"""Cost of a proxied request in the gateway's own HTTP client and in httpx.

Both clients take turns to post the same chat request to the same local server (`gateway_upstream.py`), and read the
whole answer, or all 50 events of a stream, over persistent connections. The result is the client's CPU time per
request, which other programs on the machine affect little.

    python bench/http_client.py
"""

import asyncio
import json
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import httpx
import uvloop

from tokenmill.gateway.backends.http_client import Upstream

HERE = Path(__file__).parent
ROUNDS = 5
CONCURRENT = 16
COUNTS = {"whole": 1600, "stream": 64}
PATH = "/v1/chat/completions"


def body(*, stream: bool) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": stream}).encode()


async def cpu_ms(request: Callable[[], Awaitable[None]], count: int) -> float:
    """Milliseconds of CPU time per request, with CONCURRENT requests in flight."""
    await asyncio.gather(*(request() for _ in range(CONCURRENT)))  # open the connections

    async def several() -> None:
        for _ in range(count // CONCURRENT):
            await request()

    start = time.process_time()
    await asyncio.gather(*(several() for _ in range(CONCURRENT)))
    return (time.process_time() - start) / count * 1000


async def measured(url: str) -> dict[str, dict[str, float]]:
    own = Upstream(url)
    found: dict[str, dict[str, list[float]]] = {}
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_keepalive_connections=64)) as client:
        for _ in range(ROUNDS):
            for way, payload in (("whole", body(stream=False)), ("stream", body(stream=True))):

                async def with_own(payload: bytes = payload) -> None:
                    response = await own.send("POST", PATH, payload)
                    await response.wait_for_headers()
                    while await response.part():
                        pass

                async def with_httpx(payload: bytes = payload) -> None:
                    headers = {"content-type": "application/json"}
                    async with client.stream("POST", PATH, content=payload, headers=headers) as response:
                        async for _part in response.aiter_raw():
                            pass

                for name, request in (("own", with_own), ("httpx", with_httpx)):
                    took = await cpu_ms(request, COUNTS[way])
                    found.setdefault(way, {}).setdefault(name, []).append(took)
    own.close()
    return {way: {name: median(values) for name, values in names.items()} for way, names in found.items()}


def main() -> None:
    argv = [sys.executable, str(HERE / "gateway_upstream.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = uvloop.run(measured(f"http://127.0.0.1:{server.stdout.readline().strip()}"))
        server.kill()
    print(
        f"Python {platform.python_version()}, httpx {httpx.__version__}: CPU ms per request, median of {ROUNDS} rounds"
    )
    for way, names in found.items():
        own, other = names["own"], names["httpx"]
        print(f"{way:8}own client {own:.3f}   httpx {other:.3f}   difference {other - own:.3f}")


if __name__ == "__main__":
    main()
