"""Kill storm: SIGKILL to random processes of running batches, at random moments, again and again.

    python bench/storm.py --store sqlite|postgres [--kills 1000] [--jobs 400] [--seed N] [--targets A,B]

A tiny model is written and its answers are computed once without interruption. Then `tokenmill run` works on the same
jobs (on PostgreSQL together with two `tokenmill work` processes) while the runner, the engine, its supervisor, all
three, a worker, the database server or one of its backends is killed; the same command is started again after each
kill. Each completed batch is compared with the reference, in the output file and in the store. Prints the seed: it
repeats the choices, not the exact moments. Writes results/storm.json, one entry for each store. Exits 1 if anything was
lost, doubled, changed, reordered or left running.
"""

import argparse
import json
import os
import platform
import random
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.postgres import Cluster, cluster  # noqa: E402
from support.storm import POSTGRES_TARGETS, Storm, StormOrder, Tally, Target  # noqa: E402
from support.storm_reference import make_reference  # noqa: E402
from tokenmill.hardware.cpu import read_cpu  # noqa: E402
from tokenmill.hardware.host import LocalHost  # noqa: E402

RESULT = HERE / "results/storm.json"


def main() -> int:
    """Run one storm and write its result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", choices=("sqlite", "postgres"), required=True)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=400, help="jobs of one batch")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--targets", type=_targets, default=None, help="such as engine,supervisor")
    parser.add_argument("--folder", type=Path, default=None, help="folder for stores, outputs and the model")
    parser.add_argument("--no-write", action="store_true", help="do not write results/storm.json")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-", dir=options.folder)))
        reference = make_reference(folder / "reference", options.jobs)
        server = stack.enter_context(cluster(safe=True)) if options.store == "postgres" else None
        order = StormOrder(options.kills, seed, options.targets)
        tally = Storm(folder, reference, order, server, _report_progress).run()
        database = _server_version(server) if server else f"SQLite {sqlite3.sqlite_version}"
    about = {**_machine(), "engine": reference.engine, "database": database, "jobs_per_batch": len(reference.lines)}
    if not options.no_write:
        _write(options.store, {**about, **_counts(tally)})
    print(json.dumps({**about, **_counts(tally)}, indent=2))
    return 1 if tally.damage else 0


def _targets(text: str) -> tuple[Target, ...]:
    chosen = tuple(target for target in POSTGRES_TARGETS if target in text.split(","))
    if len(chosen) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"targets are {', '.join(POSTGRES_TARGETS)}")
    return chosen


def _report_progress(tally: Tally) -> None:
    damage = ", ".join(f"{name} {count}" for name, count in tally.damage.items()) or "no damage"
    done = f"{tally.kills.total()} kills, {tally.batches} batches, {tally.jobs} jobs compared"
    print(f"\r{done}, {damage}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr)


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": read_cpu(LocalHost())[0].model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _server_version(server: Cluster) -> str:
    done = subprocess.run([server.programs / "postgres", "--version"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _counts(tally: Tally) -> dict[str, Any]:
    counts = asdict(tally)
    return {
        **counts,
        "kills": tally.kills.total(),
        "kills_by_target": dict(tally.kills),
        "exits": dict(tally.exits),
        "wall_s": round(tally.wall_s, 1),
    }


def _write(store: str, entry: dict[str, Any]) -> None:
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**known, store: entry}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
