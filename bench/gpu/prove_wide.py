"""Wide batches on a GPU: single passes by layout and width, and whole batches with thousands of slots.

    python bench/gpu/prove_wide.py --state FOLDER [--source ARCHIVE | --parts FOLDER] [--stage STAGE,...]

Writes one JSON line per measurement to FOLDER/wide.jsonl. `build` builds llama.cpp with `tokenmill engines build`'s
own code and packs it into FOLDER/parts; `--parts` unpacks such a build instead. The experts of the slice stay in host
memory, and every pass copies them to the card.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import prove_build
import prove_card
import prove_slice

import tokenmill
from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import plan_engine
from tokenmill.config import Config, EngineConfig
from tokenmill.engine.engine import Counters
from tokenmill.engine.process import registry
from tokenmill.errors import TokenmillError
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe
from tokenmill.jobs.batch_profile import batch_profile
from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.native.builds.build import BuildOptions, build
from tokenmill.native.client import NativeEngine
from tokenmill.native.llama.context import LlamaContext
from tokenmill.native.llama.library import open_running
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.sampling import row_scan
from tokenmill.native.sampling.row_scan import RowScan
from tokenmill.native.start import settings_of
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.placement import assemble, host_tier
from tokenmill.planner.plan import Plan
from tokenmill.units import MIB

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.batch_loads import Size, write

LIMIT = 4096
MARGIN = 512 * MIB
PREFIX = 256


@dataclass(frozen=True, slots=True)
class Wide:
    """What every stage uses."""

    state: Path
    config: EngineConfig

    @property
    def model(self) -> Path:
        """The slice."""
        return self.state / "slice.gguf"

    def keep(self, **row: Any) -> None:
        """Write and print a measurement."""
        with (self.state / "wide.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        say(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def plan_for(machine: Machine, profile: Profile, *, context: int, slots: int, ubatch: int) -> Plan:
    """Attention on the card, all experts in pinned host memory, copied to the card for 32 rows and more."""
    goal = Goal(
        context=context, sequences=slots, ubatch=ubatch, mmap=False, offload_min_batch=32, gpu_margin_bytes=MARGIN
    )
    where = assemble(profile, host_tier(machine), ["gpu0"] * profile.layers, "gpu0", frozenset())
    return make(machine, profile, goal_for(goal, LIMIT), placement=where)


# ---- single passes


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one sequence."""

    sequence: int
    tokens: Sequence[int]
    position: int
    logits: bool = True


def passes(wide: Wide, machine: Machine, profile: Profile) -> None:
    """Time single passes through the C API, without a scheduler."""
    plan = plan_for(machine, profile, context=512, slots=64, ubatch=4096)
    weights, settings = settings_of(plan, sequences=64)
    library = open_running(_path(wide.config.library), header=_path(wide.config.header))
    began = time.monotonic()
    model = LlamaModel.load(library, wide.model, weights)
    wide.keep(stage="load", seconds=time.monotonic() - began, limit=library.max_sequences)
    scan = RowScan(settings.threads)
    for streams, width, own, ubatch in PASSES:
        cells = width * 512 if streams else PREFIX + width * (own + 24)
        made = replace(
            settings,
            cells=-(-cells // 256) * 256,
            context=512,
            sequences=width,
            ubatch=ubatch,
            batch=ubatch,
            streams=streams,
        )
        began = time.monotonic()
        try:
            context = LlamaContext(model, made)
        except Exception as error:  # noqa: BLE001  the next case may work
            wide.keep(stage="pass", streams=streams, width=width, error=str(error)[:200])
            continue
        built_s = time.monotonic() - began
        try:
            context.decode([Row(0, range(1, PREFIX + 1), 0)])
            for target in range(1, width):
                context.copy(0, target, PREFIX)
            prefill = [timed(context, rows) for rows in prompt_batches(width, own, ubatch)]
            position = PREFIX + own
            steps = []
            for step in range(4):
                steps.append(
                    timed(
                        context,
                        [
                            Row(each, [5 + (7919 * each + 104729 * step) % 150_000], position + step)
                            for each in range(width)
                        ],
                    )
                )
            matrix = context.logits_matrix()
            sampling = {}
            for count in (1, 40):
                for size in (1, 2, 4, 8):
                    row_scan._CHUNK_BYTES = size << 20
                    began = time.monotonic()
                    scan.scan(matrix, [count] * width)
                    sampling[f"scan{count}_{size}_s"] = time.monotonic() - began
            began = time.monotonic()
            for target in range(min(width, 100)):
                context.cut(target, PREFIX)
            cut_ms = 10 * (time.monotonic() - began) * min(1.0, 100 / width)
            wide.keep(
                stage="pass",
                streams=streams,
                width=width,
                own=own,
                ubatch=ubatch,
                step_s=sorted(steps)[1],
                first_s=steps[0],
                prefill_s=[round(each, 3) for each in prefill[:6]],
                prefill_rows=ubatch // own if own else 0,
                built_s=built_s,
                cut_ms=cut_ms,
                **sampling,
            )
        except Exception as error:  # noqa: BLE001
            wide.keep(stage="pass", streams=streams, width=width, own=own, error=str(error)[:300])
        finally:
            context.close()
    scan.close()
    model.close()


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


PASSES = (  # streams, width, own tokens, micro-batch
    (False, 64, 16, 4096),
    (False, 1000, 16, 4096),
    (False, 1000, 48, 4096),
    (True, 1000, 16, 4096),
    (False, 2000, 16, 8192),
    (True, 2000, 16, 8192),
    (True, 4000, 4, 8192),
)


def prompt_batches(width: int, own: int, ubatch: int) -> Iterator[list[Row]]:
    """The own tokens of all sequences, in passes of one micro-batch."""
    each = max(1, ubatch // own)
    for start_at in range(0, width, each):
        ids = range(start_at, min(width, start_at + each))
        yield [Row(target, [7 + (target * 31 + at * 7919) % 150_000 for at in range(own)], PREFIX) for target in ids]


def timed(context: Any, rows: list[Row]) -> float:
    """Seconds of one call, until its logits are there."""
    began = time.monotonic()
    context.decode(rows)
    return time.monotonic() - began


# ---- whole batches


@dataclass(frozen=True, slots=True)
class Case:
    """A job file for `tokenmill.run`; the plan chooses regime, slots, layout and micro-batch unless `options` do."""

    name: str
    load: str
    size: Size
    options: dict[str, Any] = field(default_factory=dict)
    free_gib: int | None = 24  # memory left on the card; None: all of it


class Watch:
    """Samples the engine's counters and the card's memory in a thread, until `stop` is called."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._stop = threading.Event()
        self._held_mib = vram_used()
        self.peak_mib = 0
        self.samples: list[tuple[float, Counters]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._sample()))
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        self._thread.join()

    async def _sample(self) -> None:
        engine: NativeEngine | None = None
        while not self._stop.is_set():
            await asyncio.sleep(0.25)
            self.peak_mib = max(self.peak_mib, vram_used() - self._held_mib)
            try:
                if engine is None:
                    (record,) = registry.listed(self._state)
                    engine = await NativeEngine.connect(Path(record.address), owned=False)
                self.samples.append((time.monotonic(), (await engine.status()).counters))
            except (TokenmillError, ValueError, OSError):
                engine = None
        if engine is not None:
            await engine.close()

    def rates(self) -> dict[str, float | None]:
        """Answer tokens per second between the first and the last of them, and the share of a step outside of it."""
        rows = [(at, each) for at, each in self.samples if each.generated_tokens]
        if len(rows) < 2:
            return {"decoding_tok_s": None, "outside_share": None, "steps": None}
        (first, low), (last, high) = rows[0], rows[-1]
        made = (high.generated_tokens or 0) - (low.generated_tokens or 0)
        busy, decoding = (high.busy_s or 0) - (low.busy_s or 0), (high.decode_s or 0) - (low.decode_s or 0)
        return {
            "decoding_tok_s": made / (last - first),
            "outside_share": 1 - decoding / busy if busy else None,
            "steps": (high.steps or 0) - (low.steps or 0),
        }


async def run_case(wide: Wide, case: Case) -> None:
    """Run one job file through `tokenmill.run`, with store and output; it plans for the memory that is free."""
    async with prove_card.limited(None if case.free_gib is None else case.free_gib << 30) as free:
        folder = wide.state / f"{case.name}-{int(time.time())}"
        folder.mkdir()
        lines = write(folder / "jobs.jsonl", case.load, case.size, case.name)
        config = Config(engine=replace(wide.config, warm=False), state_dir=str(wide.state / "state"))
        planned = plan_engine(
            str(wide.model),
            EngineOptions(**case.options),
            config,
            batch=lambda: batch_profile(folder / "jobs.jsonl"),
        )
        plan = planned.plan
        gpu = sum(row.bytes for row in plan.ledger.full_context if row.tier == "gpu0" and row.item != "reserve")
        for decision in plan.decisions:
            say(f"  {decision}")
        watch = Watch(wide.state / "state")
        try:
            summary = await asyncio.to_thread(
                tokenmill.run,
                folder / "jobs.jsonl",
                output=folder / "out.jsonl",
                model=str(wide.model),
                store=str(folder / "store"),
                config=config,
                on_progress=lambda _: None,
                **case.options,
            )
        finally:
            watch.stop()
        report = summary.report
        assert report is not None
        resident = planned.regimes.fastest("resident") if planned.regimes else None
        best = planned.regimes.best if planned.regimes else None
        wide.keep(
            stage="run",
            name=case.name,
            free_gib=(free or 0) / 2**30,
            fits=plan.fits,
            jobs=len(lines),
            slots=plan.settings.sequences,
            layout="per_slot" if plan.settings.per_slot else "unified",
            ubatch=plan.settings.ubatch,
            cells=plan.settings.cells,
            ledger_mib=gpu / 2**20,
            peak_mib=watch.peak_mib,
            predicted_s=best.seconds if best else None,
            predicted_step_s=best.step_s if best else None,
            resident_s=resident.seconds if resident else None,
            resident_slots=resident.slots if resident else None,
            load_s=summary.load_s,
            seconds=summary.seconds,
            work_s=report.seconds,
            counts=str(report.counts),
            written=report.tokens.generated,
            computed=report.tokens.computed,
            tok_s=report.tokens.generated / report.seconds,
            busy_slots=report.busy_slots,
            **watch.rates(),
        )


async def served(wide: Wide, size: Size, server: Path, seconds: float) -> None:
    """Jobs of the same kind through llama-server with one slot, one after another, for a while."""
    folder = wide.state / "served"
    folder.mkdir(exist_ok=True)
    lines = write(folder / "jobs.jsonl", "one digest", size, "served")
    argv = [
        str(server),
        "-m",
        str(wide.model),
        "-ngl",
        "99",
        "--cpu-moe",
        "--load-mode",
        "none",
        "-c",
        "2048",
        "-np",
        "1",
    ]
    argv += ["-t", "14", "-ub", "2048", "-b", "2048", "-fa", "on", "--port", "18080", "--host", "127.0.0.1"]
    environment = {name: value for name, value in os.environ.items() if name != "GGML_OP_OFFLOAD_MIN_BATCH"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
        try:
            async with httpx.AsyncClient(base_url="http://127.0.0.1:18080", timeout=120, trust_env=False) as http:
                for _ in range(240):
                    try:
                        if (await http.get("/health")).status_code == 200:
                            break
                    except httpx.HTTPError:
                        pass
                    await asyncio.sleep(0.5)
                await ask(http, lines[0])  # the digest is in its cache from now on
                written = jobs = 0
                began = time.monotonic()
                for line in lines[1:]:
                    written += await ask(http, line)
                    jobs += 1
                    if time.monotonic() - began > seconds:
                        break
                took = time.monotonic() - began
            wide.keep(
                stage="served",
                name="llama-server -np 1",
                jobs=jobs,
                written=written,
                seconds=took,
                tok_s=written / took,
            )
        finally:
            process.terminate()
            process.wait(30)


async def ask(http: httpx.AsyncClient, line: dict[str, Any]) -> int:
    """Tokens of the answer to one job."""
    body = {key: value for key, value in line.items() if key != "custom_id"}
    reply = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
    return int(reply["usage"]["completion_tokens"])


def vram_used() -> int:
    """MiB in use on the card."""
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[0])


DIGEST = Size(
    jobs=2000,  # twice as many with one digest
    alone_jobs=1000,
    digest_tokens=256,
    tail_tokens=24,
    alone_tokens=250,
    output_tokens=32,
    words_per_token=0.273,  # of the slice's vocabulary
)
CASES = {
    "digest": Case("digest", "one digest", DIGEST),
    "own": Case("own", "no sharing", DIGEST),
    "resident": Case("resident", "one digest", replace(DIGEST, jobs=48), {"sequences": 48}),
}
NEEDED_S = {"digest": 120.0, "own": 100.0, "resident": 80.0, "served": 50.0, "passes": 100.0}  # with loading


def tiny(case: Case) -> Case:
    """The same with few jobs, on whatever machine this is."""
    size = replace(case.size, jobs=12, alone_jobs=12, digest_tokens=64, alone_tokens=40, output_tokens=8)
    return replace(case, size=size, free_gib=None, options={"context": 512})


def main() -> None:
    """Run the stages; one that would not end before `--until-s` is left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--parts", type=Path)
    parser.add_argument("--stage", type=lambda text: text.split(","), default=["slice", "build", *NEEDED_S])
    parser.add_argument("--until-s", type=float, default=3600.0)
    parser.add_argument("--cpu", action="store_true", help="a tiny model and the wheel, to try the script")
    asked = parser.parse_args()
    state: Path = asked.state
    state.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    os.environ["GGML_OP_OFFLOAD_MIN_BATCH"] = "32"
    if asked.cpu:
        prove_slice.write_tiny(state / "slice.gguf")
        wide = Wide(state, EngineConfig(library="wheel"))
    else:
        wide = prepared(state, asked)
    for name in asked.stage:
        left = asked.until_s - (time.monotonic() - began)
        if name not in NEEDED_S:
            continue
        if left < NEEDED_S[name]:
            say(f"{name} left out: {left:.0f} s left")
        elif name == "passes":
            passes(wide, probe(state), read(str(wide.model)))
        elif name == "served":
            server = Path(wide.config.library or "").parent / "llama-server"
            asyncio.run(served(wide, replace(DIGEST, jobs=200), server, 20))
        else:
            asyncio.run(run_case(wide, tiny(CASES[name]) if asked.cpu else CASES[name]))


def prepared(state: Path, asked: argparse.Namespace) -> Wide:
    """Write the slice while llama.cpp is built."""
    engines = state / "built"
    writer = threading.Thread(target=lambda: say(f"slice: {prove_slice.write(state / 'slice.gguf'):.1f} s"))
    if "slice" in asked.stage:
        writer.start()
    if "build" in asked.stage:
        made = build(BuildOptions(engines, state / "cache", source=asked.source, cuda=True, max_sequences=LIMIT))
        say(f"built {made.build.name} in {made.build.duration_s:.0f} s, {made.build.bytes >> 20} MiB")
    if "slice" in asked.stage:
        writer.join()
    if asked.parts is not None:
        prove_build.unpack(asked.parts, engines / "unpacked")
    (folder,) = [path.parent for path in engines.glob("*/llama.h")]
    if "pack" in asked.stage:
        say(f"{prove_build.pack(folder, state / 'parts')} parts")
    return Wide(state, EngineConfig(library=str(folder / "bin" / "libllama.so"), header=str(folder / "llama.h")))


if __name__ == "__main__":
    main()
