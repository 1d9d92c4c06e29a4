"""Validation on a GPU: compares plans, ledgers, forecasts, batches and the tuning with a real GPU and llama.cpp.

    python bench/gpu/prove.py --state FOLDER --source SDIST [--stage slice,build,...] [--budget-s 570] [--out FOLDER]
    python bench/gpu/prove.py --state FOLDER --cpu --server llama-server       small version without a GPU

Needs the repository, Python with tokenmill's dependencies, cmake, ninja and nvcc, and xllamacpp's source distribution
(an archive or its folder). Stages, with their approximate duration on an H200 machine with 16 cores:

    slice    1 min    five layers of Kimi-K2.5 with random weights, 38.9 GiB
    build    5 min    llama.cpp with CUDA: library and llama-server
    ledger   2 min    five plans loaded, every item predicted and measured
    speed    6 min    decode and prefill by threads, micro-batch, depth and sequences, on the same loads
    tune     5 min    `tokenmill tune` with the experts in host memory
    batch    6 min    shared digests: native at the tuned point, llama-server -np 1, -np 8 and -np 32
    digest   2 min    sequences that share a digest of 16 K tokens on a GPU of 12 GB

`--stage tune:170,batch,digest` limits the seconds of a stage, `--budget-s` those of the whole run. Rows are stored in
the state folder as they are measured; after a kill, the next run continues. bench/gpu/table.py makes tables of them.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import prove_build
import prove_slice
from prove_engine import LOAD_S, TINY_LOAD_S, Bench, missing, prove, say
from prove_plans import cases
from prove_rows import Clock, Rows, budgets

from tokenmill.config import EngineConfig
from tokenmill.errors import TokenmillError
from tokenmill.hardware import machine_file
from tokenmill.hardware.bandwidth import measure
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe
from tokenmill.model.read import read
from tokenmill.tuner.measure import MeasureOptions

ORDER = ("slice", "build", "ledger", "speed", "tune", "batch", "digest")
KEEP_BACK_S = 15.0  # reserved for packing the results
PROBE_S = 3.0
FIRST_SHARE = 0.4  # share of the time for the plan that is measured at most points


@dataclass(slots=True)
class Proof:
    """One run."""

    given: argparse.Namespace
    state: Path
    rows: Rows
    clock: Clock

    @property
    def model(self) -> Path:
        """The slice."""
        return (self.given.models or self.state) / ("tiny.gguf" if self.given.cpu else "slice.gguf")

    @property
    def logs(self) -> Path:
        """Configuration of engines and commands."""
        return self.state / "logs"

    def built(self) -> prove_build.Built:
        """The build to run on; raises TokenmillError if its stage has not run."""
        if self.given.server is not None:
            return prove_build.Built(self.given.library, self.given.header, self.given.server)
        found = prove_build.found(self.state / "build")
        if found is None:
            raise TokenmillError("llama.cpp is not built yet", hint="--stage build")
        return found

    def config(self) -> EngineConfig:
        """The native engine's configuration for that build."""
        built = self.built()
        return EngineConfig(library=_text(built.library), header=_text(built.header))

    def machine(self) -> Machine:
        """The machine, probed and measured once; free memory is read each time."""
        path = self.state / "machine.toml"
        here = probe(self.state)
        if not path.exists():
            say("probing the machine")
            seconds = 0.5 if self.given.cpu else PROBE_S
            found = measure.measure(here, path=self.state, seconds=seconds, progress=lambda text: say(f"  {text}"))
            machine_file.write(replace(here, measured=found), path)
            about(self, here)
        known = machine_file.read(path)
        return replace(here, measured=known.measured)

    def bench(self) -> Bench:
        """Environment variables for engines."""
        tiny = bool(self.given.cpu)
        how = MeasureOptions(seconds=0.6 if tiny else 2.0, noise=0.05)
        took = [row["load_s"] for row in self.rows.of("ledger") if "load_s" in row]
        load_s = max(took) + 5 if took else TINY_LOAD_S if tiny else LOAD_S
        return Bench(self.model, self.config(), self.state / "engines", self.logs, self.rows, tiny, how, load_s)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def about(proof: Proof, machine: Machine) -> None:
    """Facts of the machine and the builds."""
    driver = _said(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_only": bool(proof.given.cpu),
        "machine": machine.name,
        "os": machine.os,
        "virtual": machine.virtual,
        "cpu": machine.cpu.model,
        "cores": machine.cpu.cores,
        "dram_bytes": machine.dram.total_bytes,
        "gpus": [{"name": gpu.name, "vram_bytes": gpu.vram_bytes} for gpu in machine.gpus],
        "driver": driver,
        "nvcc": _said(["nvcc", "--version"]),
        "python": platform.python_version(),
    }
    proof.rows.add("build", "about", **facts)


def _said(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else None


def stage_slice(proof: Proof, clock: Clock) -> None:
    """Write the model."""
    seconds = (
        prove_slice.write_tiny(proof.model)
        if proof.given.cpu
        else prove_slice.write(proof.model, layers=proof.given.layers)
    )
    size = proof.model.stat().st_size
    if seconds:
        proof.rows.add(
            "slice", "slice", seconds=seconds, bytes=size, layers=None if proof.given.cpu else proof.given.layers
        )
    say(f"slice: {size / (1 << 30):.2f} GiB in {seconds:.1f} s")


def stage_build(proof: Proof, clock: Clock) -> None:
    """Build llama.cpp, or unpack a build made elsewhere."""
    folder = proof.state / "build"
    if proof.given.server is not None or prove_build.found(folder) is not None:
        say("build: it is there")
        return
    if proof.given.built is not None and prove_build.unpack(proof.given.built, folder) is not None:
        say("build: unpacked")
        return
    if proof.given.source is None:
        raise TokenmillError("nothing to build from", hint="--source: xllamacpp's source distribution")
    built, seconds, cuda = prove_build.make(proof.given.source, proof.state, clock, cuda=not proof.given.cpu)
    version = _said([str(built.server), "--version"])
    proof.rows.add("build", "build", seconds=seconds, cuda=",".join(cuda) or None, version=version)
    say(f"build: {seconds:.0f} s, {', '.join(f'sm_{number}' for number in cuda) or 'without CUDA'}")
    if proof.given.out is not None:
        say(f"build: packed in {prove_build.pack(folder, proof.given.out)} parts")


def stage_plans(proof: Proof, stages: set[str], clock: Clock) -> None:
    """Ledger and speed, which share one load per plan."""
    machine = proof.machine()
    bench = proof.bench()
    found = cases(machine, read(str(proof.model)), tiny=bench.tiny)
    cores = machine.cpu.cores or os.cpu_count() or 1
    waiting = [
        case
        for case in found
        if (proof.given.case is None or proof.given.case in case.name)
        and (missing(bench, case, stages, cores) or ("ledger" in stages and not bench.rows.has("ledger", case.name)))
    ]
    while waiting:
        case, *waiting = waiting
        share = clock.left_s * (FIRST_SHARE if case is found[0] and waiting else 1 / (len(waiting) + 1))
        asyncio.run(prove(bench, case, stages, clock.part(share), cores))


def stage_tune(proof: Proof, clock: Clock) -> None:
    """Find the operating point."""
    from prove_tune import Tuning, tune  # noqa: PLC0415

    machine = proof.machine()
    tuning = Tuning(
        proof.model, machine, proof.state / "machine.toml", proof.config(), proof.state / "tune", bool(proof.given.cpu)
    )
    tune(tuning, proof.rows, clock, proof.logs / "tune.log")


def _work(proof: Proof) -> Any:
    from prove_batch import Work  # noqa: PLC0415

    machine = proof.machine()
    row = proof.rows.get("tune", "point")
    fallback = {
        "threads": machine.cpu.cores or 8,
        "threads_batch": machine.cpu.cores or 8,
        "sequences": 4 if proof.given.cpu else 16,
        "ubatch": 512,
        "cache_type_k": "f16",
        "cache_type_v": "f16",
    }
    dials = fallback if row is None or "point" not in row else row["point"]["dials"]
    return Work(
        machine, read(str(proof.model)), proof.built().server, dials, proof.state / "batch", bool(proof.given.cpu)
    )


def stage_batch(proof: Proof, clock: Clock) -> None:
    """Batches with shared digests."""
    from prove_batch import batches  # noqa: PLC0415

    asyncio.run(batches(proof.bench(), _work(proof), clock))


def stage_digest(proof: Proof, clock: Clock) -> None:
    """A long digest on a small GPU."""
    from prove_digest import digest  # noqa: PLC0415

    asyncio.run(digest(proof.bench(), _work(proof), clock))


ALONE: dict[str, Callable[[Proof, Clock], None]] = {
    "slice": stage_slice,
    "build": stage_build,
    "tune": stage_tune,
    "batch": stage_batch,
    "digest": stage_digest,
}


def run(proof: Proof, wanted: dict[str, float]) -> int:
    """Run the requested stages in order; a failed stage does not stop the others."""
    failed = 0
    for name in (name for name in ORDER if name in wanted):
        if name == "speed" and "ledger" in wanted:
            continue  # done together with the other one
        together = {name} | ({"speed"} & wanted.keys() if name == "ledger" else set())
        seconds = sum(wanted[each] for each in together)
        clock = proof.clock.part(min(seconds, proof.clock.left_s))
        began = time.monotonic()
        say(f"--- {' and '.join(sorted(together))}: {clock.left_s:.0f} s")
        try:
            if name in ("ledger", "speed"):
                stage_plans(proof, together, clock)
            else:
                ALONE[name](proof, clock)
        except (TokenmillError, OSError, ValueError, KeyError) as error:
            failed += 1
            hint = getattr(error, "hint", None)
            say(f"{name} failed: {error}" + (f"\n{hint}" if hint else ""))
            proof.rows.add(name, "stage failed", error=str(error), hint=hint)
        proof.rows.add("build", f"time {name} {int(time.time())}", of=name, took_s=time.monotonic() - began)
    return 1 if failed else 0


def pack(proof: Proof) -> None:
    """Archive rows and logs in the state folder and the output folder."""
    target = proof.state / "proof.tar.gz"
    with tarfile.open(target, "w:gz") as tar:
        for name in ("rows", "logs", "machine.toml", "tune/points", "engines/measured"):
            if (proof.state / name).exists():
                tar.add(proof.state / name, arcname=name)
    if proof.given.out is not None:
        shutil.copy2(target, proof.given.out / target.name)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="folder that is kept between runs")
    parser.add_argument("--stage", default=",".join(ORDER), help="stages, separated by commas; NAME:SECONDS limits one")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="seconds for the whole run")
    parser.add_argument("--source", type=Path, help="xllamacpp's source distribution, or llama.cpp's folder")
    parser.add_argument("--built", type=Path, help="folder with the parts of a build, from the --out of an earlier run")
    parser.add_argument("--out", type=Path, help="additional folder for all results")
    parser.add_argument("--models", type=Path, help="folder for the slice; default: the state folder")
    parser.add_argument(
        "--layers", type=int, default=prove_slice.LAYERS, help="layers of the slice, of which the first is dense"
    )
    parser.add_argument("--case", help="only plans whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU: a tiny model, and the wheel's library")
    parser.add_argument("--server", type=Path, help="a llama-server to use instead of building one")
    parser.add_argument("--library", type=Path, help="with --server: its libllama.so; default: the wheel's")
    parser.add_argument("--header", type=Path, help="with --library: its llama.h")
    return parser.parse_args()


def main() -> int:
    """Run the stages; returns the exit code."""
    given = arguments()
    try:
        wanted = budgets(given.stage, given.budget_s)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.cpu and given.server is None:
        print("error: --cpu needs --server: a llama-server of a CPU build", file=sys.stderr)
        return 2
    state = given.state.absolute()
    state.mkdir(parents=True, exist_ok=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(state / "rows", given.out)
    rows.mirror_all()
    proof = Proof(given, state, rows, Clock.of(given.budget_s - KEEP_BACK_S))
    try:
        return run(proof, wanted)
    finally:
        pack(proof)
        counts = {path.stem: len(rows.of(path.stem)) for path in sorted((state / "rows").glob("*.jsonl"))}
        say(f"rows: {json.dumps(counts)}")


if __name__ == "__main__":
    sys.exit(main())
