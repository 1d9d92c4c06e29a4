"""Compares plans for GPUs with dry runs of a CUDA build of llama.cpp, which project every buffer without loading.

    python bench/gpu/verify_plans.py --library build/bin/libllama.so --header include/llama.h [--output verify.json]

Models are ghost files, so that a trillion parameters need a few megabytes. Smaller GPUs are simulated by planning for
them, with unlimited host memory. Prints predicted and projected bytes for every device and item.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe
from tokenmill.model.describe import describe
from tokenmill.model.gguf import read_headers
from tokenmill.model.profile import Profile
from tokenmill.model.synthetic import ghost
from tokenmill.native.verify import Verification, verify
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB, MIB

MODELS = (
    "kimi-k2.5:Q4_X",
    "kimi-k2.5:Q4_K_M",
    "qwen3-235b-a22b:Q4_K_M",
    "glm-4.5:Q4_K_M",
    "gpt-oss-120b:MXFP4_MOE",
    "llama-4-scout:Q6_K",
    "llama-3.3-70b:Q4_K_M",
)
CARDS_GIB = (12, 24, 48, 139)
CONTEXTS = ((8192, 512, "f16"), (32768, 512, "q8_0"), (131072, 2048, "f16"))


def machine_with(card_gib: int, real: Machine) -> Machine:
    """This machine with a smaller GPU and unlimited host memory."""
    gpu = replace(real.gpus[0], vram_bytes=card_gib * GIB, free_bytes=None)
    dram = replace(real.dram, total_bytes=2048 * GIB, available_bytes=None)
    return replace(real, name=f"{card_gib} GiB card", gpus=(gpu,), dram=dram, numa=())


def plans(profile: Profile, real: Machine) -> Iterator[tuple[str, Plan]]:
    for card in CARDS_GIB:
        for context, ubatch, kind in CONTEXTS:
            if context > (profile.training_context or context):
                continue
            goal = Goal(context=context, sequences=1, ubatch=ubatch, cache_type_k=kind, cache_type_v=kind)
            found = make(machine_with(card, real), profile, goal)
            if found.fits and found.placement.gpus:
                yield f"{card} GiB, {context} tokens {kind}, ub {ubatch}", found


def rows_of(found: Verification) -> list[dict[str, object]]:
    return [
        {
            "tier": row.tier,
            "item": row.item,
            "predicted_mib": round(row.predicted_bytes / MIB, 2),
            "projected_mib": round(row.projected_bytes / MIB, 2),
            "agrees": row.agrees,
        }
        for row in found.rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--header", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    asked = parser.parse_args()
    real = probe()
    if not real.gpus:
        sys.exit("error: no GPU is here")
    deadline = time.monotonic() + asked.seconds
    results = []
    wrong = 0
    with TemporaryDirectory() as folder:
        for model in MODELS:
            path = Path(folder) / "ghost.gguf"
            ghost.write(model, path, force=True)
            profile = describe(read_headers(path))
            for what, plan in plans(profile, real):
                if time.monotonic() > deadline:
                    break
                found = verify(plan, path, library=asked.library, header=asked.header)
                rows = rows_of(found)
                results.append(
                    {"model": model, "plan": what, "engine": found.version, "rows": rows, "notes": found.notes}
                )
                wrong += not found.agrees
                cells = (f"{row['tier']} {row['item']} {row['predicted_mib']}/{row['projected_mib']}" for row in rows)
                print(f"{'ok ' if found.agrees else 'NO '} {model}, {what}: {'; '.join(cells)}", flush=True)
    if asked.output:
        card = real.gpus[0].name
        asked.output.write_text(json.dumps({"gpu": card, "plans": results}, indent=1, ensure_ascii=False))
    print(f"{len(results) - wrong} of {len(results)} plans agree")
    sys.exit(1 if wrong or not results else 0)


if __name__ == "__main__":
    main()
