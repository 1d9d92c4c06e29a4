"""Runs llama.cpp's RPC backend as `tokenmill plan` describes it, with a head and workers on loopback.

    python bench/rpc.py BINARIES MODEL.gguf [--machine FILE] [--layers 10,10,10] [--rounds 5] [--out FILE]

BINARIES is a folder with llama-server and ggml-rpc-server of one build with -DGGML_RPC=ON. The distributed server and a
single process get the same requests in turns, because the speed of a shared host changes from second to second; results
are medians over the rounds. Compares the greedy text, each worker's memory and buffers with its ledger, the bytes over
the sockets (counted by TCP), the load time, and the time per token, in wall time and in CPU time of all processes. The
time per token is the difference between a long and a short answer. The loopback link is measured first. Exits 1 if the
texts differ.
"""

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tokenmill.cli.planning.plan_hosts import spell_hosts
from tokenmill.hardware.catalog import find
from tokenmill.hardware.fleet import Fleet, FleetHost, NetworkLink
from tokenmill.hardware.machine import Machine
from tokenmill.launch import spell
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.multi_host.forecast import worker_terms
from tokenmill.planner.multi_host.hosts import HostShare, HostsPlan
from tokenmill.planner.multi_host.make import make_over
from tokenmill.planner.plan import Speed
from tokenmill.units import MIB, format_bytes

PROMPT = "The history of the steam engine begins with"
LOOPBACK = "127.0.0.1"
READY_S = 300.0
SHORT = 8  # tokens of the short answer that is subtracted


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer and its speed."""

    text: str
    decode_tok_s: float
    prefill_tok_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two compared setups: its address, its processes, and the workers' ports."""

    port: int
    pids: list[int]
    ports: list[int]


def main() -> int:
    """Run the comparison; returns the exit code."""
    given = _arguments()
    machine = find(given.machine)
    link = _loopback()
    goal = Goal(
        context=given.context,
        sequences=1,
        threads=given.threads,
        threads_batch=given.threads,
        cpu_only=True,
        repack=False,
        mmap=True,
        ubatch=given.ubatch,
    )
    counts = tuple(int(part) for part in given.layers.split(","))
    fleet = _fleet(machine, link, len(counts))
    profile = read(str(given.model))
    plan = make_over(fleet, profile, goal, layers=counts)
    alone = make(machine, profile, goal)
    binary = str(given.binaries / "llama-server")
    port = _free_port()
    other = _free_port()
    commands = spell_hosts(plan, model=str(given.model), port=port, binary=binary)
    single = spell(alone, model=str(given.model), port=other, binary=binary)
    with ExitStack() as stack:
        folder = given.logs
        folder.mkdir(parents=True, exist_ok=True)
        workers: dict[str, int] = {}
        for one in commands[:-1]:
            argv = [str(given.binaries / "ggml-rpc-server"), *one.command.argv[1:]]
            if given.cache is None:
                argv.remove("--cache")
            env = {} if given.cache is None else {"LLAMA_CACHE": str(given.cache / one.host)}
            workers[one.host] = stack.enter_context(_running(argv, folder / f"{one.host}.log", env)).pid
        for share in plan.workers:
            _listening(share.host.port)
        idle = {name: _memory(pid) for name, pid in workers.items()}
        said = ["--log-verbosity", "4"]  # position in the log from which buffers are reported
        lonely = stack.enter_context(_running([*single.argv, *said], folder / "alone.log"))
        alone_load_s = _ready(other)
        head = stack.enter_context(_running([*commands[-1].command.argv, *said], folder / "head.log"))
        load_s = _ready(port)
        load_cpu_s = {"alone": _cpu_s([lonely.pid]), "head": _cpu_s([head.pid]), "workers": _cpu_s([*workers.values()])}
        ports = [share.host.port for share in plan.workers]
        load_wire_bytes = _wire_bytes(ports)
        sides = {"alone": Side(other, [lonely.pid], []), "over_hosts": Side(port, [head.pid, *workers.values()], ports)}
        found = _compare(given, plan, sides)
        memory = {name: _memory(pid) for name, pid in workers.items()}
    report = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.name,
        "cpu": machine.cpu.model,
        "build": _version(binary),
        "model": given.model.name,
        "layers": list(counts),
        "threads": given.threads,
        "link": {"gb_s": link.gb_s, "round_trip_s": link.round_trip_s, "python": platform.python_version()},
        "load_s": {"alone": alone_load_s, "over_hosts": load_s, "forecast_warm": plan.forecast.load_warm_s},
        "load_cpu_s": load_cpu_s,
        "load_wire_bytes": load_wire_bytes,
        "sent_bytes": sum(share.weights_bytes for share in plan.workers),
        "head_buffers_mib": _buffers(folder / "head.log"),
        "workers": [_worker(share, idle[share.host.name], memory[share.host.name]) for share in plan.workers],
        "predicted": {
            "alone": _predicted(alone.forecast.decode, alone.forecast.prefill),
            "over_hosts": _predicted(plan.forecast.decode, plan.forecast.prefill),
            "link_s": sum(t.seconds for t in plan.forecast.decode[0].terms if t.name.startswith("link")),
        },
        **found,
    }
    text = json.dumps(report, indent=2)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 0 if report["same_text"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("binaries", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--machine", default="this")
    parser.add_argument("--layers", default="10,10,10", help="layers of the head, then of each worker")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--predict", type=int, default=96, help="tokens in addition to the short answer")
    parser.add_argument("--prompt-words", type=int, default=400, help="tokens of the prompt for measuring prefill")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/tokenmill-rpc"))
    parser.add_argument("--cache", type=Path, help="folder in which workers cache large tensors; default: no cache")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _fleet(machine: Machine, link: NetworkLink, count: int) -> Fleet:
    hosts = [
        FleetHost("head" if index == 0 else f"worker{index}", replace(machine, name="here"), LOOPBACK, _free_port())
        for index in range(count)
    ]
    return Fleet(tuple(hosts), link)


def _compare(given: argparse.Namespace, plan: HostsPlan, sides: dict[str, Side]) -> dict[str, Any]:
    """Send requests to both in turns, after one warm-up round."""
    filler = "word " * given.prompt_words
    texts: dict[str, set[str]] = {name: set() for name in sides}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(given.rounds + 1):
        for name, side in sides.items():
            first, crossed = _counted(side, PROMPT, 1)
            _, little = _counted(side, PROMPT, SHORT)
            long, much = _counted(side, PROMPT, SHORT + given.predict)
            read_in, _ = _counted(side, f"{filler}{turn}", 1)
            texts[name].add(long.text)
            rows[name].append(
                {
                    "decode_tok_s": long.decode_tok_s,
                    "prefill_tok_s": read_in.prefill_tok_s,
                    "cpu_s_per_token": (much["cpu_s"] - little["cpu_s"]) / given.predict,
                    "wire_bytes_per_token": (much["wire"] - little["wire"]) / given.predict,
                    "wire_bytes_of_prompt": crossed["wire"],
                    "prompt_tokens": first.prompt_tokens,
                }
            )
    found = {name: {key: median(row[key] for row in some[1:]) for key in some[0]} for name, some in rows.items()}
    tokens = round(found["over_hosts"]["prompt_tokens"])
    prompt = [
        term
        for share in plan.workers
        for term in worker_terms(plan.fleet, plan.profile, share, tokens, tokens, prefill=True)
    ]
    added = found["over_hosts"]["cpu_s_per_token"] - found["alone"]["cpu_s_per_token"]
    return {
        "same_text": texts["alone"] == texts["over_hosts"] and len(texts["alone"]) == 1,
        "text": sorted(texts["over_hosts"])[0],
        "measured": found,
        "best_decode_tok_s": {name: max(row["decode_tok_s"] for row in some) for name, some in rows.items()},
        "added_cpu_s_per_token": added,
        "predicted_wire": {"per_token": _wire_forecast(plan), "prompt": sum(term.bytes or 0.0 for term in prompt)},
    }


def _counted(side: Side, prompt: str, count: int) -> tuple[Answer, dict[str, float]]:
    """An answer, with the CPU time and the bytes over the sockets."""
    cpu = _cpu_s(side.pids)
    wire = _wire_bytes(side.ports)
    answer = _ask(side.port, prompt, count)
    return answer, {"cpu_s": _cpu_s(side.pids) - cpu, "wire": _wire_bytes(side.ports) - wire}


def _cpu_s(pids: list[int]) -> float:
    """CPU seconds of these processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _buffers(log: Path) -> dict[str, float]:
    """MiB of every buffer that the head reports."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"(\S+)\s+(model|KV|compute|output) buffer size =\s+([0-9.]+) MiB", text)
    return {f"{where} {what}": float(size) for where, what, size in found}


def _wire_forecast(plan: HostsPlan) -> float:
    return sum(term.bytes or 0.0 for term in plan.forecast.decode[0].terms if term.name.startswith("link"))


def _predicted(decode: tuple[Speed, ...], prefill: tuple[Speed, ...]) -> dict[str, float | None]:
    return {"decode_tok_s": decode[0].tok_s if decode else None, "prefill_tok_s": prefill[0].tok_s if prefill else None}


def _worker(share: HostShare, idle: dict[str, int], memory: dict[str, int]) -> dict[str, Any]:
    """Compare a worker's memory with its ledger, without reserves."""
    rows = {row.item: row.bytes for row in share.ledger.after_load if row.item != "reserve"}
    peak = sum(row.bytes for row in share.ledger.load_peak if row.item != "reserve")
    return {
        "host": share.host.name,
        "layers": share.count,
        "ledger": rows,
        "predicted_bytes": sum(rows.values()),
        "predicted_peak_bytes": peak,
        "idle": idle,
        "measured": memory,
        "words": f"{format_bytes(sum(rows.values()))} predicted, {format_bytes(memory['VmRSS'])} seen",
    }


@contextmanager
def _running(argv: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that is ended with the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=os.environ | (env or {}))
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _listening(port: int) -> None:
    """Wait until a port is listened on, without connecting, which the server would log as an error."""
    end = time.monotonic() + READY_S
    wanted = f"{port:04X}"
    while time.monotonic() < end:
        rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        if any(row.split()[1].endswith(f":{wanted}") and row.split()[3] == "0A" for row in rows):
            return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")


def _ready(port: int) -> float:
    """Seconds until the server reports that it is ready."""
    began = time.monotonic()
    while time.monotonic() - began < READY_S:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/health", timeout=5):
                return time.monotonic() - began
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.02)
    raise SystemExit(f"the server on port {port} is not ready: see its log")


def _ask(port: int, prompt: str, count: int) -> Answer:
    body = json.dumps(
        {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    )
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/completion", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=READY_S) as reply:
        said = json.load(reply)
    times = said["timings"]
    return Answer(said["content"], times["predicted_per_second"], times["prompt_per_second"], times["prompt_n"])


def _memory(pid: int) -> dict[str, int]:
    """Resident memory now, and its peak."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    return {name: int(size) << 10 for name, size in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE)}


def _wire_bytes(ports: list[int]) -> int:
    """Bytes that the head has exchanged with the workers so far, counted by TCP."""
    total = 0
    for port in ports:
        done = subprocess.run(["ss", "-tinH", "dst", f"{LOOPBACK}:{port}"], capture_output=True, text=True, check=True)
        total += sum(int(count) for count in re.findall(r"bytes_(?:acked|received):(\d+)", done.stdout))
    return total


def _loopback(*, trips: int = 2000, size: int = 256 * MIB) -> NetworkLink:
    """Round trip time of a small message and rate of a large one over loopback."""
    with socket.create_server((LOOPBACK, 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(trips):
                    peer.sendall(peer.recv(64))
                left = size
                while left > 0:
                    left -= len(peer.recv(MIB))
                peer.sendall(b"x")

        thread = threading.Thread(target=answer)
        thread.start()
        with socket.create_connection(server.getsockname()) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(trips):
                began = time.perf_counter()
                sock.sendall(b"x")
                sock.recv(64)
                times.append(time.perf_counter() - began)
            block = bytes(MIB)
            began = time.perf_counter()
            for _ in range(size // MIB):
                sock.sendall(block)
            sock.recv(1)
            rate = size / (time.perf_counter() - began) / 1e9
        thread.join()
    return NetworkLink(round(rate, 2), median(times))


def _version(binary: str) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version:.*", done.stdout + done.stderr)
    return found[0] if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
