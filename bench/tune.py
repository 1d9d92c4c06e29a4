"""Compares the search for an operating point with measuring every combination, on one load of the native engine.

    python bench/tune.py [--models moe,smollm2] [--seconds 2] [--rounds 5] [--ubatch 256,512] [--cache f16]
                         [--small] [--busy] [--no-write]

All combinations of a given space of threads, sequences, micro-batch and cache type are measured in random order. Then
the search runs without that knowledge. Both choices are measured again in turns; their ratio is the result, together
with the number of runs of each. Goal: at least 95 % of the best combination with at most a fifth of the runs. Trials
that other processes disturbed are repeated up to three times; --busy accepts them. Exits 1 if a goal is missed. Writes
results/tune.json.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from bench.batch import model_file  # noqa: E402

from tokenmill.config import EngineConfig  # noqa: E402
from tokenmill.engine.server import embedded  # noqa: E402
from tokenmill.hardware.probe import probe  # noqa: E402
from tokenmill.model.read import read  # noqa: E402
from tokenmill.native.worker_config import goal_for  # noqa: E402
from tokenmill.planner.goal import Goal  # noqa: E402
from tokenmill.planner.make import make  # noqa: E402
from tokenmill.planner.plan import Plan  # noqa: E402
from tokenmill.tuner.engine_rig import NativeRig, Starter  # noqa: E402
from tokenmill.tuner.measure import MeasureOptions  # noqa: E402
from tokenmill.tuner.noise_monitor import NoiseMonitor  # noqa: E402
from tokenmill.tuner.point import Aim, Trial, TrialSettings  # noqa: E402
from tokenmill.tuner.search.forecasts import forecaster  # noqa: E402
from tokenmill.tuner.search.search import Search  # noqa: E402
from tokenmill.tuner.search.space import Space, start_for  # noqa: E402
from tokenmill.tuner.trial_run import TrialContext, TrialStep, attempt, drive  # noqa: E402
from tokenmill.tuner.work import WorkFor, generated_jobs  # noqa: E402

AIM = Aim(prompt_tokens=256, tail_tokens=32, output_tokens=32)
CONTEXT = 1024
MIN_SHARE = 0.95
MAX_RUNS = 0.20
AGAIN = 3  # maximum attempts at a disturbed trial


def space_of(cores: int, ubatch: tuple[int, ...], cache: tuple[str, ...], *, small: bool) -> Space:
    """The space: 160 combinations on two cores, 320 on four and more, or 24 for a smoke test."""
    threads = tuple(range(1, cores + 1)) if cores < 4 else tuple(cores * part // 4 for part in (1, 2, 3, 4))
    if small:
        return Space(
            threads=(1,),
            sequences=(1, 2, 4, 8),
            ubatch=(128, 256, 512),
            context=(CONTEXT,),
            cache_types=(("f16", "f16"), ("q8_0", "q8_0")),
        )
    return Space(
        threads=threads,
        sequences=(1, 2, 4, 6, 8, 12, 16, 24, 32, 48),
        ubatch=ubatch,
        context=(CONTEXT,),
        cache_types=tuple((type_, type_) for type_ in cache),
    )


def figure(trial: Trial) -> float:
    """The compared figure; 0 if a trial failed."""
    return trial.figures.jobs_tok_s or 0.0 if trial.outcome == "measured" else 0.0


async def tried(bed: TrialContext, dials: TrialSettings, work: WorkFor, number: int) -> Trial:
    """A trial, repeated if it was disturbed."""
    for again in range(AGAIN):
        trial = await attempt(bed, dials, work, AGAIN * number + again)
        if trial.disturbed is None:
            break
    return trial


async def everything(bed: TrialContext, space: Space, work: WorkFor) -> list[Trial]:
    """Measure every combination once, in random order, so that changes of the machine affect all alike."""
    order = list(space.combinations())
    random.Random(1).shuffle(order)
    trials = []
    for number, dials in enumerate(order):
        trials.append(await tried(bed, dials, work, number))
        told(len(trials), len(order), trials[-1])
    return trials


async def searched(bed: TrialContext, plan: Plan, space: Space, work: WorkFor) -> tuple[Trial | None, int, str]:
    """Run the search; returns its choice, its runs, and why it stopped."""
    limit = int(MAX_RUNS * space.all())
    search = Search(space, AIM, start_for(plan, space), forecast=forecaster(plan, AIM), max_trials=limit)

    def step(done: TrialStep) -> None:
        told(done.number, limit, done.trial)

    made = await drive(bed, search, work, keep=lambda _: None, tell=step)
    return search.best(), len(made), search.reason


async def side_by_side(
    bed: TrialContext, rivals: Sequence[TrialSettings], work: WorkFor, rounds: int
) -> list[list[float]]:
    """Figures of each choice, measured in turns."""
    found: list[list[float]] = [[] for _ in rivals]
    for number in range(rounds):
        for rates, dials in zip(found, rivals, strict=True):
            rates.append(figure(await tried(bed, dials, work, 10_000 + number)))
    return found


async def on_model(name: str, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both methods on one model."""
    path = model_file(name, folder)
    cores = len(os.sched_getaffinity(0))
    space = space_of(cores, asked.ubatch, asked.cache, small=asked.small)
    plan = make(probe(path), read(str(path)), goal_for(Goal(context=CONTEXT, sequences=8, threads=cores)))
    starter = Starter(path, EngineConfig(), folder / "state", f"bench-{name}")
    rig = NativeRig(plan, starter, max_sequences=max(space.sequences))
    bed = TrialContext(plan, rig, MeasureOptions(asked.seconds), watch=None if asked.busy else NoiseMonitor)
    work = generated_jobs(AIM)
    try:
        print(f"{name}: everything, {space.all()} combinations", file=sys.stderr)
        whole = await everything(bed, space, work)
        print(f"{name}: the search, at most {int(MAX_RUNS * space.all())} runs", file=sys.stderr)
        best, runs, reason = await searched(bed, plan, space, work)
        top = max((trial for trial in whole if asked.busy or trial.disturbed is None), key=figure, default=None)
        if best is None or top is None:
            raise RuntimeError("every trial was disturbed: wait for a quiet machine, or use --busy")
        rates = await side_by_side(bed, (top.dials, best.dials), work, asked.rounds)
    finally:
        await rig.close()
    found = {
        "model": name,
        "bytes": path.stat().st_size,
        "combinations": space.all(),
        "runs": runs,
        "runs_share": round(runs / space.all(), 3),
        "reason": reason,
        "loads": rig.loads,
        "everything": {"dials": asdict(top.dials), "jobs_tok_s": [round(rate, 2) for rate in rates[0]]},
        "search": {"dials": asdict(best.dials), "jobs_tok_s": [round(rate, 2) for rate in rates[1]]},
        "share_of_best": round(median(second / first for first, second in zip(*rates, strict=True) if first), 3),
        "disturbed": sum(trial.disturbed is not None for trial in whole),
        "grid": [asdict(replace(trial, detail=None)) for trial in whole],
    }
    found["missed"] = misses(found)
    show(found)
    return found


def misses(found: dict[str, Any]) -> list[str]:
    """Goals that are missed."""
    missed = []
    if found["share_of_best"] < MIN_SHARE:
        missed.append(f"{found['share_of_best']:.1%} of the best of everything, goal {MIN_SHARE:.0%}")
    if found["runs_share"] > MAX_RUNS:
        missed.append(f"{found['runs_share']:.1%} of its runs, goal {MAX_RUNS:.0%}")
    return missed


def told(number: int, of: int, trial: Trial) -> None:
    """Print one trial."""
    dials = trial.dials
    words = f"{dials.threads} threads, {dials.sequences} sequences, ubatch {dials.ubatch}, {dials.cache_type_k}"
    told = f"{figure(trial):.3g} tok/s" if trial.outcome == "measured" else trial.outcome
    print(f"  {number:3}/{of}  {words}: {told}" + (f" ({trial.disturbed})" if trial.disturbed else ""), file=sys.stderr)


def show(found: dict[str, Any]) -> None:
    """Print both choices and the two ratios."""
    print(f"\n{found['model']}: tokens a second of a batch, prompts counted")
    for way in ("everything", "search"):
        dials = found[way]["dials"]
        rates = found[way]["jobs_tok_s"]
        runs = found["combinations"] if way == "everything" else found["runs"]
        print(
            f"  {way:10} {runs:4} runs  {median(rates):8.1f} tok/s at {dials['threads']} threads,"
            f" {dials['sequences']} sequences, ubatch {dials['ubatch']}, {dials['cache_type_k']}"
        )
    print(
        f"  the search finds {found['share_of_best']:.1%} of the best with {found['runs_share']:.1%} of the runs;"
        f" it stopped: {found['reason']}"
    )
    print(*(f"  missed: {text}" for text in found["missed"]), sep="\n", end="\n" if found["missed"] else "")


def main() -> int:
    """Run the benchmark and judge the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["moe", "smollm2"])
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each trial")
    parser.add_argument("--rounds", type=int, default=5, help="repeats of both choices, in turns")
    parser.add_argument("--ubatch", type=lambda text: tuple(map(int, text.split(","))), default=(128, 256, 512, 1024))
    parser.add_argument("--cache", type=lambda text: tuple(text.split(",")), default=("f16", "q8_0"))
    parser.add_argument("--small", action="store_true", help="use a small space, for a smoke test")
    parser.add_argument("--busy", action="store_true", help="accept trials that other processes disturbed")
    parser.add_argument("--no-write", action="store_true", help="do not write results/")
    asked = parser.parse_args()
    began = time.perf_counter()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        models = [asyncio.run(on_model(name, asked, Path(folder))) for name in asked.models]
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": probe(HERE).cpu.model,
        "cores": len(os.sched_getaffinity(0)),
        "build": embedded.version(),
        "aim": asdict(AIM),
        "busy": asked.busy,
        "load_before": round(load_before, 2),
        "seconds": round(time.perf_counter() - began),
    }
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items() if key != "aim"))
    if not asked.no_write:
        target = HERE / "results" / "tune.json"
        target.write_text(json.dumps({**about, "models": models}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(model["missed"] for model in models) else 0


if __name__ == "__main__":
    sys.exit(main())
