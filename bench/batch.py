"""Batch throughput of the native engine compared with llama-server, on small job files.

    python bench/batch.py [--rounds 3] [--threads 2] [--models moe,smollm2] [--loads ...] [--width N] [--no-write]

Four loads (batch_loads.py) run in four ways (batch_ways.py) with the same llama.cpp, model, threads, context and
micro-batch, greedy sampling and answers of the same length. Each round runs every way once, on new texts, all
concurrently in short turns (batch_turns.py), so that other load on the machine affects all ways equally. Prints medians
and their ratios, and the computed prompt tokens relative to the minimum that the prefix tree allows. The native
engine's number of slots is measured with `tuner/slots.py` before the first round of each load, as in `tokenmill run`;
its duration is printed, as is the share of time inside llama.cpp. Exits 1 if a goal is missed. Writes
results/batch.json.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from bench.batch_loads import LOADS, WORDS, Line, Size, write  # noqa: E402
from bench.batch_turns import in_turns  # noqa: E402
from bench.batch_ways import CONTEXT, NATIVE_LANES, UBATCH, WAYS, Pass, Ways, fresh, run, up  # noqa: E402

from tokenmill.config import Config  # noqa: E402
from tokenmill.engine.server import embedded  # noqa: E402
from tokenmill.hardware.cpu import read_cpu  # noqa: E402
from tokenmill.hardware.host import LocalHost  # noqa: E402
from tokenmill.jobs.ingest.line import call_of  # noqa: E402
from tokenmill.jobs.scheduler.prefix_groups import minimum  # noqa: E402
from tokenmill.model.pull import pull  # noqa: E402
from tokenmill.model.synthetic import generate  # noqa: E402
from tokenmill.native.client import NativeEngine  # noqa: E402
from tokenmill.tuner.point import SlotPoint  # noqa: E402
from tokenmill.tuner.slots import measure  # noqa: E402
from tokenmill.units import GIB, number_of  # noqa: E402

# As in Kimi, the weights of experts and not attention limit the speed: 96 experts of which 4 are active, a shared one,
# a dense first layer, latent attention with two heads. At a depth of 1300 tokens attention takes a fifth of the decode
# time on one thread; the file is eight times the L3 cache of the machine that it was designed on.
MOE = {
    "layers": 4,
    "embed": 1024,
    "heads": 2,
    "head_dim": 64,
    "experts": 96,
    "used": 4,
    "expert_ff": 512,
    "dense_ff": 2048,
    "vocab": 4096,
}
SIZES = {
    "moe": Size(jobs=48, alone_jobs=96, digest_tokens=1300, tail_tokens=32, alone_tokens=160, output_tokens=64),
    "smollm2": Size(jobs=24, alone_jobs=64, digest_tokens=650, tail_tokens=24, alone_tokens=96, output_tokens=24),
}
ROUNDS = {"moe": 2, "smollm2": 2}
MIN_SHARE = 0.97
MIN_DECODE = 0.97
DECODE_LOAD, DECODE_WIDTH = "one digest", 8  # loads to which the second goal applies
MAX_COMPUTED = 1.02
GOALS = {"one digest": {"a: -np 1": 1.3, "b: -np 8": 1.3}, "four digests shuffled": {"a: -np 1": 1.25, "b: -np 8": 1.8}}


@dataclass(slots=True)
class Load:
    """Measurements of one load: passes by way, in the order of the rounds."""

    name: str
    jobs: int
    least_tokens: list[int] = field(default_factory=list)  # minimum prompt tokens, by round
    prompt_tokens: list[int] = field(default_factory=list)
    slots: int = NATIVE_LANES  # of the native engine
    point: SlotPoint | None = None  # None: the slots were not measured
    calibration_s: float = 0.0
    passes: dict[str, list[Pass]] = field(default_factory=lambda: {way: [] for way in WAYS})
    alone: list[Pass] = field(default_factory=list)  # of the native engine, without turns
    eight: list[Pass] = field(default_factory=list)  # with DECODE_WIDTH slots, to which the goal applies

    def jobs_min(self, way: str) -> float:
        """The median."""
        return median(60 * self.jobs / each.seconds for each in self.passes[way])

    def ratio(self, way: str) -> float:
        """Jobs per minute of the native engine relative to a way: median over the rounds."""
        pairs = zip(self.passes[way], self.passes["native"], strict=True)
        return median(other.seconds / native.seconds for other, native in pairs)

    def cpu_ratio(self, way: str) -> float:
        """The same in CPU time, which other programs on the machine affect less."""
        pairs = zip(self.passes[way], self.passes["native"], strict=True)
        return median(other.cpu_s / native.cpu_s for other, native in pairs)

    def computed(self, way: str) -> float:
        """Computed prompt tokens relative to the minimum."""
        pairs = zip(self.passes[way], self.least_tokens, strict=True)
        return median(each.computed_tokens / least for each, least in pairs)

    def decode_share(self, *, eight: bool = False) -> float:
        """Share of the native engine's busy time inside llama.cpp."""
        return median(each.decode_share or 0.0 for each in (self.eight if eight else self.alone))


def model_file(name: str, folder: Path) -> Path:
    """The model's file, which is written or downloaded if it is missing."""
    if name == "smollm2":
        return pull("smollm2", models_path=Config().models_path, keep_free_bytes=GIB).path
    path = folder / "moe.gguf"
    if not path.exists():
        generate.write("moe-mla", generate.sizes("moe-mla", dict(MOE)), path)
    return path


async def calibrate(native: NativeEngine, load: Load, size: Size, folder: Path, given: int | None) -> None:
    """Measure the slots for a load, on texts of no round, and the duration."""
    if given is not None:
        load.slots = given
        return
    lines = write(folder / f"{load.name.replace(' ', '-')}-calibration.jsonl", load.name, size, "calibration")
    requests = [call_of(json.dumps(line)).request("batch") for line in lines[:NATIVE_LANES]]
    await native.set_context(streams=False)
    began = time.perf_counter()
    load.point = await measure(native, requests, NATIVE_LANES)
    load.slots = load.point.slots or NATIVE_LANES
    load.calibration_s = time.perf_counter() - began
    print(f"{described(load)} ({load.calibration_s:.1f} s)", file=sys.stderr)


def described(load: Load) -> str:
    """The slots of a load and the reason for their number."""
    reason = load.point.slots_reason if load.point is not None else "as given"
    return f"{load.name}: {number_of(load.slots, 'slot')}, {reason}"


async def play(ways: Ways, load: Load, size: Size, folder: Path, number: int) -> None:
    """One round of one load, in every way."""
    path = folder / f"{load.name.replace(' ', '-')}-{number}.jsonl"
    lines = write(path, load.name, size, f"round {number}")
    prompts = [await ways.native.tokenize(call_of(json.dumps(line)).prompt) for line in lines]
    load.jobs = len(lines)
    load.least_tokens.append(minimum(prompts))
    load.prompt_tokens.append(sum(map(len, prompts)))
    ways.width = load.slots
    await fresh(ways)
    done = await in_turns({way: run(way, ways, path, lines) for way in WAYS}, ways.pids())
    for way, (found, seconds) in done.items():
        expected = len(lines) * size.output_tokens
        if found.written_tokens != expected:
            raise RuntimeError(f"{way} wrote {found.written_tokens} tokens of {expected}")
        load.passes[way].append(replace(found, seconds=seconds))
        rate = 60 * len(lines) / seconds
        cost = f"{found.cpu_s:5.1f} s of processors"
        print(
            f"    {way:12} {seconds:6.2f} s  {rate:6.0f} jobs/min  {found.computed_tokens:6} tokens  {cost}",
            file=sys.stderr,
        )
    if not load.alone:
        load.alone.append(await alone(ways, path, lines))
    if load.name == DECODE_LOAD and not load.eight:
        ways.width = DECODE_WIDTH
        load.eight.append(await alone(ways, path, lines))


async def alone(ways: Ways, path: Path, lines: Sequence[Line]) -> Pass:
    """One pass of the native engine while the other engines are idle."""
    await fresh(ways)
    again = path.with_name(f"{path.stem}-alone-{ways.width}-{time.monotonic_ns()}.jsonl")
    again.write_bytes(path.read_bytes())
    return await run("native", ways, again, lines, counted=True)


async def on_model(name: str, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All loads on one model."""
    size = SIZES[name]
    rounds = asked.rounds or ROUNDS[name]
    path = model_file(name, Path(tempfile.gettempdir()) if asked.keep else folder)
    async with up(path, folder / name, asked.threads, asked.pinned) as ways:
        some = " ".join(WORDS)
        size = replace(size, words_per_token=len(WORDS) / len(await ways.native.tokenize(some)))
        loads = [Load(each, size.jobs) for each in asked.loads]
        texts = folder / f"{name}-texts"
        texts.mkdir()
        for load in loads:
            await calibrate(ways.native, load, size, texts, asked.width)
        for number in range(rounds):
            for load in loads:
                print(f"  {load.name}, round {number + 1}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
                await play(ways, load, size, texts, number)
    missed = [text for load in loads for text in misses(name, load)]
    show(name, loads, missed)
    return {
        "model": name,
        "bytes": path.stat().st_size,
        "size": asdict(size),
        "rounds": rounds,
        "missed": missed,
        "loads": [summed(load) for load in loads],
    }


def misses(model: str, load: Load) -> list[str]:
    """Goals that are missed."""
    found = []
    others = [way for way in WAYS if way != "native"]
    for way, goal in GOALS.get(load.name, {}).items():
        if model == "moe" and load.ratio(way) < goal:
            found.append(f"{load.name}: {load.ratio(way):.2f} x {way}, goal {goal:g}")
    worst = min(load.ratio(way) for way in others)
    if worst < MIN_SHARE:
        found.append(f"{load.name}: {worst:.2f} x the best of the others, goal {MIN_SHARE:g}")
    if load.computed("native") > MAX_COMPUTED:
        found.append(f"{load.name}: {load.computed('native'):.3f} x the least prompt tokens, goal {MAX_COMPUTED:g}")
    if model == "moe" and load.eight and load.decode_share(eight=True) < MIN_DECODE:
        share = f"{load.decode_share(eight=True):.1%} of busy time in llama.cpp with {DECODE_WIDTH} slots"
        found.append(f"{load.name}: {share}, goal {MIN_DECODE:.0%}")
    return found


def summed(load: Load) -> dict[str, Any]:
    """A load as JSON."""
    return {
        "name": load.name,
        "width": load.slots,
        "points": [{"width": slots, "tok_s": rate} for slots, rate in load.point.decode_tok_s] if load.point else [],
        "calibration_s": round(load.calibration_s, 2),
        "jobs": load.jobs,
        "least_tokens": load.least_tokens,
        "prompt_tokens": load.prompt_tokens,
        "jobs_min": {way: round(load.jobs_min(way), 1) for way in WAYS},
        "native_against": {way: round(load.ratio(way), 3) for way in WAYS if way != "native"},
        "native_against_in_cpu_s": {way: round(load.cpu_ratio(way), 3) for way in WAYS if way != "native"},
        "computed_against_least": {way: round(load.computed(way), 3) for way in WAYS},
        "decode_share": round(load.decode_share(), 4),
        "decode_share_8": round(load.decode_share(eight=True), 4) if load.eight else None,
        "passes": {way: [asdict(each) for each in passes] for way, passes in load.passes.items()},
    }


def show(name: str, loads: Sequence[Load], missed: Sequence[str]) -> None:
    """Print the table of one model."""
    print(f"\n{name}: jobs per minute (prompt tokens computed / least)")
    print(
        f"  {'':22}"
        + "".join(f"{way:>16}" for way in WAYS)
        + "   native against a, b, c   in processor time   in llama.cpp"
    )
    for load in loads:
        cells = [f"{load.jobs_min(way):.0f} ({load.computed(way):.2f})" for way in WAYS]
        ratios = ", ".join(f"{load.ratio(way):.2f}" for way in WAYS if way != "native")
        spent = ", ".join(f"{load.cpu_ratio(way):.2f}" for way in WAYS if way != "native")
        print(
            f"  {load.name:22}" + "".join(f"{cell:>16}" for cell in cells) + f"   {ratios:22}   {spent:17}   "
            f"{load.decode_share():.1%}"
        )
    print(*(f"  {described(load)}" for load in loads), sep="\n")
    for load in (load for load in loads if load.eight):
        print(f"  {load.name}: {load.decode_share(eight=True):.1%} in llama.cpp with {DECODE_WIDTH} slots")
    print(*(f"  missed: {text}" for text in missed), sep="\n", end="\n" if missed else "")


def main() -> int:
    """Run the benchmark and judge the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pinned", type=int, default=4, help="slots of way c")
    parser.add_argument("--width", type=int, default=None, help="slots of the native engine; default: measured")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["moe", "smollm2"])
    parser.add_argument("--loads", type=lambda text: text.split(","), default=list(LOADS))
    parser.add_argument("--keep", action="store_true", help="keep the synthetic model in the temporary folder")
    parser.add_argument("--no-write", action="store_true", help="do not write results/")
    asked = parser.parse_args()
    began = time.perf_counter()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        models = [asyncio.run(on_model(name, asked, Path(folder))) for name in asked.models]
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": read_cpu(LocalHost())[0].model,
        "cores": len(os.sched_getaffinity(0)),
        "threads": asked.threads,
        "build": embedded.version(),
        "context": CONTEXT,
        "ubatch": UBATCH,
        "pinned_slots": asked.pinned,
        "load_before": round(load_before, 2),
        "seconds": round(time.perf_counter() - began),
    }
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items()))
    if not asked.no_write:
        target = HERE / "results" / "batch.json"
        target.write_text(json.dumps({**about, "models": models}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(model["missed"] for model in models) else 0


if __name__ == "__main__":
    sys.exit(main())
