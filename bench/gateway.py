"""Overhead that the gateway adds between a client and a server, compared with LiteLLM's proxy.

    python bench/gateway.py [--rounds 5] [--seconds 3] [--without-litellm]

A server that answers immediately, a gateway and the load generator run in separate processes on this machine. LiteLLM's
proxy (one worker) has its own environment, created under .cache by the first run. Rounds are interleaved in changing
order, because other programs may use the same cores; the results are medians, and ratios within rounds. The gateways
forward one short chat. Latency is measured with one client, the request rate with sixteen, and the time from the
server's write of a token to the client's read with four streams. Exits 1 if a goal is missed. Writes
results/gateway.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenmill.engine.process.ports import free_port
from tokenmill.hardware.cpu import read_cpu
from tokenmill.hardware.host import LocalHost

HERE = Path(__file__).parent
LITELLM = HERE.parent / ".cache" / "litellm"
KEY = "sk-bench"
MAX_ADDED_MS = 2.0
MIN_REQUESTS_S = 500.0
MAX_TOKEN_MS = 1.0
MIN_RATIO = 10.0
AT_ONCE = 16
STREAMS = 4
READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server or gateway to measure."""

    name: str
    url: str
    version: str
    key: str = KEY


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one target in one round."""

    target: str
    round: int
    load_before: float  # load average of the machine
    median_ms: float  # with one client
    requests_s: float  # with sixteen clients
    many_ms: float  # the median then
    many_p99_ms: float
    token_ms: float  # with four streams: median lag of a token
    token_p99_ms: float


@contextmanager
def running(*argv: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended with the block."""
    with subprocess.Popen(argv, text=True, **settings) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def until_ready(target: Target, process: subprocess.Popen[str], log: Path) -> None:
    """Wait until the target lists its models."""
    url = target.url
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {target.key}"})
    ends_s = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > ends_s:
                raise SystemExit(f"{url} does not answer:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.2)


def trivial(stack: ExitStack) -> Target:
    process = stack.enter_context(
        running(sys.executable, str(HERE / "gateway_upstream.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    assert process.stdout is not None
    return Target("direct", f"http://127.0.0.1:{process.stdout.readline().strip()}", "bench/gateway_upstream.py")


def tokenmill(stack: ExitStack, upstream: Target, folder: Path) -> Target:
    port = free_port("127.0.0.1", 0)
    log = folder / "tokenmill.log"
    (folder / "tokenmill.toml").write_text(f'state_dir = "{folder}"\n')
    argv = [
        sys.executable,
        "-m",
        "tokenmill",
        "serve",
        "--engine",
        upstream.url,
        "--port",
        str(port),
        "--config",
        str(folder / "tokenmill.toml"),
    ]
    made = said("-m", "tokenmill", "keys", "add", "bench", "--json", "--config", argv[-1], python=sys.executable)
    key = str(json.loads(made)["key"])  # the other gateway checks a key, too
    output = stack.enter_context(log.open("w"))
    process = stack.enter_context(running(*argv, stdout=output, stderr=output))
    version = said("-m", "tokenmill", "--version", python=sys.executable)
    target = Target("tokenmill", f"http://127.0.0.1:{port}", version, key)
    until_ready(target, process, log)
    return target


def litellm(stack: ExitStack, upstream: Target, folder: Path) -> Target:
    python = str(LITELLM / "bin" / "python")
    if not (LITELLM / "bin" / "litellm").exists():
        print("creating an environment for LiteLLM's proxy ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(LITELLM)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "litellm[proxy]"], check=True)
    port = free_port("127.0.0.1", 0)
    log = folder / "litellm.log"
    settings = folder / "litellm.yaml"
    settings.write_text(
        json.dumps(
            {
                "model_list": [
                    {
                        "model_name": "trivial",
                        "litellm_params": {
                            "model": "openai/trivial",
                            "api_base": f"{upstream.url}/v1",
                            "api_key": "none",
                        },
                    }
                ],
                "general_settings": {"master_key": KEY},
            }
        )
    )
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    output = stack.enter_context(log.open("w"))
    argv = [
        str(LITELLM / "bin" / "litellm"),
        "--config",
        str(settings),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--num_workers",
        "1",
        "--telemetry",
        "False",
    ]
    process = stack.enter_context(running(*argv, stdout=output, stderr=output, env=env, cwd=folder))
    version = said("-c", "import importlib.metadata as m; print(m.version('litellm'))", python=python)
    target = Target("litellm", f"http://127.0.0.1:{port}", f"litellm {version}")
    until_ready(target, process, log)
    return target


def said(*argv: str, python: str) -> str:
    return subprocess.run([python, *argv], check=True, capture_output=True, text=True).stdout.strip()


def ask(target: Target, way: str, at_once: int, seconds: float) -> dict[str, Any]:
    argv = [
        sys.executable,
        str(HERE / "gateway_load.py"),
        target.url,
        "trivial",
        target.key,
        way,
        str(at_once),
        str(seconds),
    ]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=seconds + 60)
    found: dict[str, Any] = json.loads(done.stdout)
    if set(found["statuses"]) != {"200"}:
        raise SystemExit(f"{target.name} answered with {found['statuses']}")
    return found


def measure(target: Target, number: int, seconds: float) -> Round:
    load = os.getloadavg()[0]
    alone = ask(target, "whole", 1, seconds)
    many = ask(target, "whole", AT_ONCE, seconds)
    lag = ask(target, "stream", STREAMS, seconds)["lag"]
    return Round(
        target.name,
        number,
        load,
        alone["took"]["median"],
        many["requests_s"],
        many["took"]["median"],
        many["took"]["p99"],
        lag["median"],
        lag["p99"],
    )


def summary(rounds: list[Round]) -> dict[str, dict[str, float]]:
    """Medians of the overhead relative to the direct connection within a round, and of rates; also the best rate."""
    direct = {one.round: one for one in rounds if one.target == "direct"}
    found = {}
    for name in dict.fromkeys(one.target for one in rounds):
        own = [one for one in rounds if one.target == name]
        found[name] = {
            "median_ms": statistics.median(one.median_ms for one in own),
            "added_ms": statistics.median(one.median_ms - direct[one.round].median_ms for one in own),
            "requests_s": statistics.median(one.requests_s for one in own),
            "best_requests_s": max(one.requests_s for one in own),
            "p99_by_median": statistics.median(one.many_p99_ms / one.many_ms for one in own),
            "token_added_ms": statistics.median(one.token_ms - direct[one.round].token_ms for one in own),
        }
    return found


def ratios(rounds: list[Round]) -> dict[str, float]:
    """Requests per second relative to LiteLLM, by round."""
    ours, theirs = ({one.round: one for one in rounds if one.target == name} for name in ("tokenmill", "litellm"))
    each = [ours[number].requests_s / theirs[number].requests_s for number in theirs]
    return {"median": statistics.median(each), "worst": min(each), "best": max(each)} if each else {}


def missed(found: dict[str, dict[str, float]], ratio: dict[str, float]) -> list[str]:
    ours = found["tokenmill"]
    goals = [
        (ours["added_ms"] < MAX_ADDED_MS, f"adds {ours['added_ms']:.2f} ms; the goal is under {MAX_ADDED_MS} ms"),
        (ours["requests_s"] >= MIN_REQUESTS_S, f"{ours['requests_s']:.0f} requests/s; goal {MIN_REQUESTS_S:.0f}"),
        (ours["token_added_ms"] < MAX_TOKEN_MS, f"adds {ours['token_added_ms']:.2f} ms a token; goal {MAX_TOKEN_MS}"),
        (not ratio or ratio["median"] >= MIN_RATIO, f"{ratio.get('median', 0):.1f} times LiteLLM; the goal is ten"),
    ]
    return [words for held, words in goals if not held]


def line(one: Round) -> str:
    rate = f"{one.requests_s:9.0f} /s {one.many_ms:6.1f} ({one.many_p99_ms:.1f}) ms"
    token = f"{one.token_ms:7.2f} ({one.token_p99_ms:.2f}) ms"
    return f"{one.round:5}  {one.target:9}  {one.median_ms:7.2f} ms  {rate}  {token}  {one.load_before:6.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--without-litellm", action="store_true")
    parser.add_argument("--no-results", action="store_true", help="print only")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gateway-bench-"))
    rounds: list[Round] = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        upstream = trivial(stack)
        targets = [upstream, tokenmill(stack, upstream, folder)]
        if not options.without_litellm:
            targets.append(litellm(stack, upstream, folder))
        for target in targets:
            for way in ("whole", "stream"):
                ask(target, way, 1, 1.0)  # not measured: the first request loads and compiles
        print("round  target     one client  sixteen clients, median (p99)  token lag (p99)    load")
        for number in range(options.rounds):
            turned = targets[number % len(targets) :] + targets[: number % len(targets)]
            for target in turned:
                one = measure(target, number, options.seconds)
                rounds.append(one)
                print(line(one), flush=True)
    found = summary(rounds)
    ratio = ratios(rounds)
    for name, values in found.items():
        print(
            f"{name}: adds {values['added_ms']:.2f} ms, {values['requests_s']:.0f} requests/s (best "
            f"{values['best_requests_s']:.0f}), adds {values['token_added_ms']:.2f} ms a token"
        )
    if ratio:
        spread = f"{ratio['worst']:.1f} to {ratio['best']:.1f}"
        print(f"tokenmill / litellm: {ratio['median']:.1f} times the requests/s ({spread})")
    if not options.no_results:
        written = {
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "processor": read_cpu(LocalHost())[0].model,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "seconds": options.seconds,
            "at_once": AT_ONCE,
            "streams": STREAMS,
            "versions": {one.name: one.version for one in targets},
            "summary": found,
            "requests_s_ratio": ratio,
            "rounds": [asdict(one) for one in rounds],
        }
        (HERE / "results" / "gateway.json").write_text(json.dumps(written, indent=1) + "\n")
    wrong = missed(found, ratio)
    for words in wrong:
        print(f"missed: {words}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
