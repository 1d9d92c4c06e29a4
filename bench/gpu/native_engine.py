"""The native engine on a CUDA build of llama.cpp: load, share a prefix, decode, and compare memory with the plan.

    python bench/gpu/native_engine.py --library build/bin/libllama.so --header include/llama.h [--output native.json]

A synthetic mixture of experts runs in three placements: all on the GPU, experts in host memory, and without the GPU. In
each, sixteen requests share a prefix of two thousand tokens. Prints the measurements.
"""

import argparse
import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Answer, Request, Sampling, answer
from tokenmill.errors import TokenmillError
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe
from tokenmill.model.read import read
from tokenmill.model.synthetic import generate
from tokenmill.native.launching import launch_engine
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB, MIB

HEAD = 2000
TAIL = 24
OUT = 64
REQUESTS = 16
SIZES = generate.Sizes(
    layers=8,
    embed=2048,
    heads=16,
    head_dim=128,
    kv_heads=4,
    experts=64,
    used=8,
    expert_ff=1024,
    vocab=32768,
    context=8192,
)


def plans(machine: Machine, model: Path, threads: int) -> dict[str, Plan]:
    """A plan for each placement; the experts are moved to host memory by planning for a smaller GPU."""
    profile = read(str(model))
    goal = Goal(context=4096, sequences=REQUESTS, threads=threads, threads_batch=threads)
    found = {"all on the card": make(machine, profile, goal_for(goal))}
    for gib in (1, 2, 3, 4):
        small = replace(machine, gpus=(replace(machine.gpus[0], vram_bytes=gib * GIB, free_bytes=None),))
        plan = make(small, profile, goal_for(replace(goal, gpu_margin_bytes=128 * MIB)))
        if plan.fits and plan.placement.gpus:
            found["experts in host memory"] = replace(plan, machine=machine)
            break
    found["without the card"] = make(machine, profile, goal_for(replace(goal, cpu_only=True)))
    return found


def request(number: int) -> Request:
    tokens = [100 + at * 7919 % 30000 for at in range(HEAD)] + [200 + number * 31 + at for at in range(TAIL)]
    return Request(tuple(tokens), Sampling(temperature=0.0, top_logprobs=0), max_tokens=OUT, ignore_eos=True)


async def measured(plan: Plan, model: Path, config: EngineConfig, state: Path) -> dict[str, Any]:
    up = await launch_engine(plan, model_path=model, config=config, state=state, name="gpu")
    try:
        alone: Answer = await answer(up.engine, request(0))
        before = (await up.engine.status()).counters
        began = time.monotonic()
        answers = await asyncio.gather(*(answer(up.engine, request(number)) for number in range(1, REQUESTS + 1)))
        seconds = time.monotonic() - began
        await asyncio.sleep(0.5)
        after = (await up.engine.status()).counters
        decode_s = (after.decode_s or 0) - (before.decode_s or 0)
        busy_s = (after.busy_s or 0) - (before.busy_s or 0)
        return {
            "build": up.engine.identity.build,
            "load_s": up.load_s,
            "decode_alone_tok_s": (OUT - 1) / (alone.timings.decode_s or 1),
            "prefill_alone_tok_s": (HEAD + TAIL) / (alone.timings.prefill_s or 1),
            "requests": REQUESTS,
            "tokens_per_second": REQUESTS * OUT / seconds,
            "cached_tokens": [each.usage.cached_tokens for each in answers],
            "share_in_decode": decode_s / busy_s,
            "first_logprobs": [each.logprob for each in (alone.logprobs or ())[:4]],
            "reconciliation": [
                {**asdict(row), "flagged": row.flagged} for row in up.held.rows if row.measured_bytes is not None
            ],
        }
    finally:
        await up.engine.close()


async def killed(plan: Plan, model: Path, config: EngineConfig, state: Path) -> float:
    """Seconds from killing a worker on the GPU to the first answer of the restarted one."""
    import os  # noqa: PLC0415
    import signal  # noqa: PLC0415

    up = await launch_engine(plan, model_path=model, config=replace(config, warm=False), state=state, name="gpu")
    try:
        began = time.monotonic()
        os.kill(up.engine.identity.pid or 0, signal.SIGKILL)
        while True:
            try:
                await answer(up.engine, request(0))
            except TokenmillError:
                continue
            return time.monotonic() - began
    finally:
        await up.engine.close()


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--library", required=True)
    reader.add_argument("--header", required=True)
    reader.add_argument("--threads", type=int, default=8)
    reader.add_argument("--output", type=Path)
    given = reader.parse_args()
    config = EngineConfig(library=given.library, header=given.header)
    machine = probe(Path.cwd())
    found: dict[str, Any] = {"machine": machine.name, "cards": [gpu.name for gpu in machine.gpus]}
    with TemporaryDirectory() as folder:
        model = Path(folder) / "moe.gguf"
        generate.write("moe", SIZES, model)
        found["model_bytes"] = model.stat().st_size
        for name, plan in plans(machine, model, given.threads).items():
            try:
                found[name] = asyncio.run(measured(plan, model, config, Path(folder)))
            except TokenmillError as error:
                found[name] = {"error": error.message, "hint": error.hint}
            print(name, json.dumps(found[name], indent=1), flush=True)
            if name == "all on the card" and "error" not in found[name]:
                found["back_after_kill_s"] = asyncio.run(killed(plan, model, config, Path(folder)))
                print("back after a kill", found["back_after_kill_s"], flush=True)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
