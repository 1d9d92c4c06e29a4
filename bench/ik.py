"""Batch throughput of the native engine on ik_llama.cpp compared with llama.cpp and llama-server, on small job files.

    tokenmill engines build --ik --source FOLDER
    python bench/ik.py [--rounds 3] [--threads 2] [--models moe,smollm2] [--loads ...] [--slots 8] [--no-write]

The loads of batch.py run on one model in four ways: native on llama.cpp, native on ik_llama.cpp, llama-server with
`-np 1` and with `-np 8`. Each round runs every way once, on new texts, all concurrently in short turns, so that other
load on the machine affects all ways equally. Prints the medians of jobs per minute and the ratio of ik_llama.cpp to
the others. Writes results/ik.json.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from bench.batch import MOE, SIZES, model_file  # noqa: E402
from bench.batch_loads import LOADS, WORDS, Line, write  # noqa: E402
from bench.batch_turns import in_turns  # noqa: E402
from bench.batch_ways import SERVER, Pass, by_clients, by_worker, plan_for  # noqa: E402

from tokenmill.config import Config, EngineConfig  # noqa: E402
from tokenmill.engine.server.client import ServerEngine  # noqa: E402
from tokenmill.hardware.cpu import read_cpu  # noqa: E402
from tokenmill.hardware.host import LocalHost  # noqa: E402
from tokenmill.model.synthetic import generate  # noqa: E402
from tokenmill.native.builds.finished import FROM_IK, with_build  # noqa: E402
from tokenmill.native.client import NativeEngine  # noqa: E402
from tokenmill.native.launching import start  # noqa: E402
from tokenmill.planner.goal import DialectName  # noqa: E402

# As in batch.py, but with ordinary attention: ik_llama.cpp loads latent attention of DeepSeek's sizes only.
MIXTURE = {name: MOE[name] for name in ("layers", "embed", "experts", "used", "expert_ff", "vocab")} | {
    "heads": 16,
    "head_dim": 64,
}
IK = "native, ik_llama.cpp"
WAYS = ("native, llama.cpp", IK, "llama-server -np 1", "llama-server -np 8")


@dataclass(slots=True)
class Engines:
    """All engines on one model; idle ones use no CPU time."""

    by_way: dict[str, NativeEngine | ServerEngine] = field(default_factory=dict)

    def pids(self) -> dict[str, int]:
        """PIDs of the engines by way."""
        return {way: engine.identity.pid for way, engine in self.by_way.items() if engine.identity.pid is not None}

    async def clear(self, slots: int) -> None:
        """Empty all caches."""
        for engine in self.by_way.values():
            if isinstance(engine, NativeEngine):
                await engine.set_slots(slots)
                continue
            for slot in range(engine.identity.slots or 1):
                await engine.ask("POST", f"/slots/{slot}?action=erase", {})

    async def run(self, way: str, path: Path, lines: Sequence[Line], slots: int) -> Pass:
        """One pass in one way."""
        engine = self.by_way[way]
        if isinstance(engine, ServerEngine):
            return await by_clients(engine, lines, engine.identity.slots or 1)
        own = path.with_name(f"{path.stem}-{WAYS.index(way)}.jsonl")
        own.write_bytes(path.read_bytes())
        return await by_worker(engine, own, slots)


async def started(model: Path, state: Path, threads: int, slots: int, stack: AsyncExitStack) -> Engines:
    """Start every engine on one model."""
    library = with_build(EngineConfig(library=FROM_IK), Config().engines_path)
    configs = {WAYS[0]: EngineConfig(), IK: library, WAYS[2]: SERVER, WAYS[3]: SERVER}
    found = Engines()
    for way, config in configs.items():
        sequences = 1 if way.endswith("-np 1") else 8 if way.endswith("-np 8") else slots
        native = config.kind == "native"
        dialect: DialectName = "ik_llama" if way == IK else "llama.cpp"
        plan = plan_for(model, sequences=sequences, threads=threads, native=native, engine=dialect)
        name = f"ik-{WAYS.index(way)}"
        engine = await start(plan, model_path=model, config=config, state=state, name=name)
        stack.push_async_callback(engine.close)
        assert isinstance(engine, NativeEngine | ServerEngine)
        found.by_way[way] = engine
    return found


def mixture(folder: Path) -> Path:
    """A mixture of experts with random weights."""
    path = folder / "mixture.gguf"
    generate.write("moe", generate.sizes("moe", dict(MIXTURE)), path)
    return path


async def on_model(name: str, asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All loads on one model, as rows."""
    size = SIZES[name]
    model = mixture(folder) if name == "moe" else model_file(name, folder)
    rows = []
    async with AsyncExitStack() as stack:
        engines = await started(model, folder / name, asked.threads, asked.slots, stack)
        native = engines.by_way[WAYS[0]]
        assert isinstance(native, NativeEngine)
        size = replace(size, words_per_token=len(WORDS) / len(await native.tokenize(" ".join(WORDS))))
        for load in asked.loads:
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(asked.rounds):
                path = folder / f"{name}-{load.replace(' ', '-')}-{number}.jsonl"
                lines = write(path, load, size, f"round {number}")
                await engines.clear(asked.slots)
                work = {way: engines.run(way, path, lines, asked.slots) for way in WAYS}
                done = await in_turns(work, engines.pids())
                for way, (found, took_s) in done.items():
                    if found.written_tokens != len(lines) * size.output_tokens:
                        raise RuntimeError(f"{way} wrote {found.written_tokens} tokens")
                    seconds[way].append(took_s)
            rows.append(_row(name, load, len(lines), seconds))
            print(rows[-1], file=sys.stderr)
    return rows


def _row(model: str, load: str, jobs: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        way: [other / ik for other, ik in zip(seconds[way], seconds[IK], strict=True)] for way in WAYS if way != IK
    }
    return {
        "model": model,
        "load": load,
        "jobs": jobs,
        "jobs_min": {way: round(median(60 * jobs / each for each in seconds[way]), 1) for way in WAYS},
        "ik_against": {way: round(median(found), 3) for way, found in ratios.items()},
    }


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slots", type=int, default=8, help="slots of the native engines")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["moe", "smollm2"])
    parser.add_argument("--loads", type=lambda text: text.split(","), default=list(LOADS))
    parser.add_argument("--no-write", action="store_true", help="do not write results/")
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in asked.models for row in asyncio.run(on_model(name, asked, Path(folder)))]
    build = Path(with_build(EngineConfig(library=FROM_IK), Config().engines_path).library or "").parents[1].name
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": read_cpu(LocalHost())[0].model,
        "threads": asked.threads,
        "slots": asked.slots,
        "build": build,
        "load_before": round(load_before, 2),
    }
    for row in rows:
        ratios = ", ".join(f"{value:.2f} x {way}" for way, value in row["ik_against"].items())
        print(f"{row['model']:8} {row['load']:24} ik {row['jobs_min'][IK]:7.1f} jobs/min: {ratios}")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if not asked.no_write:
        (HERE / "results" / "ik.json").write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
