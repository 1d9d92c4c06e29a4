"""Simulates how cost grows from one engine to a thousand, with a million jobs and the product's own sharding.

    python bench/simulate.py [--jobs 1000000] [--processes 2] [--page]

Every engine is a `Scheduler` of `tokenmill.jobs` over a model of an engine with recorded speeds (simulation/). Jobs are
assigned by the pure functions of `jobs/sharding/policy.py`, through a store with the measured costs of PostgreSQL. All
results are predicted. They are checked against small batches that were really run, and single jobs against works of
several jobs. Writes results/simulation.json, docs/scale.md and docs/img/scale.svg; --page writes the last two from an
existing results/simulation.json.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from multiprocessing import Pool
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from bench.simulation import recorded  # noqa: E402
from bench.simulation.fleet import Fleet, Outcome  # noqa: E402
from bench.simulation.loads import LOADS, kinds, scattered  # noqa: E402
from bench.simulation.page import page  # noqa: E402
from bench.simulation.plot import plot  # noqa: E402
from bench.simulation.recorded import HARSH_HOURS, LANES, Recorded  # noqa: E402
from bench.simulation.sharing import quickly_joined  # noqa: E402
from bench.simulation.store import StoreCosts  # noqa: E402
from bench.simulation.table import Table  # noqa: E402

from tokenmill.jobs.sharding import policy  # noqa: E402
from tokenmill.jobs.sharding.worker_lease import LEASE_S, RENEW_S  # noqa: E402
from tokenmill.jobs.worker.loop import TICK_S  # noqa: E402

MANY = "four digests for each 48 jobs"
ENGINES = (1, 16, 64, 256, 1000)
FEW = (1, 64)  # for secondary questions, with a tenth of the jobs
SMALL = (1, 64)
WORKS = 80_000  # minimum number of works of a batch
ORDER = ("jobs", "engine", "load", "way", "store", "failures", "engines")
CHECKED_JOBS = 5_000
CHECKED_WORKS = 400
STORES = {"measured": 1, "eight writers": 8, "free": None}
FAILURES: dict[str, float | None] = {"none": None, "harsh": HARSH_HOURS, "hourly": 1.0}


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated batch."""

    engine: str
    load: str
    way: str  # assigned or scattered
    engines: int
    failures: str
    jobs: int
    least_works: int | None = WORKS
    store: str = "measured"  # one of STORES
    seed: str = "1"


def engine_of(name: str) -> Recorded:
    """By name."""
    return recorded.small() if name == "small" else recorded.giant()


def store_of(name: str) -> StoreCosts | None:
    """The store's costs by name; None: no cost."""
    writers = STORES[name]
    return None if writers is None else recorded.store(writers)


def simulate(case: Case) -> Outcome:
    """Simulate one batch from the load to the last answer."""
    engine = engine_of(case.engine)
    all_kinds = kinds(case.load, case.jobs, recorded.nights())
    shares = None
    if case.way == "assigned":
        table = Table(all_kinds, seed=case.seed)
    else:
        pieces = scattered(all_kinds, case.engines, case.seed)
        ends = [0, *accumulate(sum(jobs for _, jobs in own) for own in pieces)]
        shares = list(pairwise(ends))
        table = Table(all_kinds, [piece for own in pieces for piece in own], seed=case.seed)
    fleet = Fleet(
        engine,
        table,
        case.engines,
        store_of(case.store),
        seed=case.seed,
        shares=shares,
        least_works=case.least_works,
        hours_between_failures=FAILURES[case.failures],
    )
    outcome = fleet.run()
    if outcome.answered != case.jobs:
        raise AssertionError(f"{outcome.answered} jobs of {case.jobs} were answered: {case}")
    return outcome


def cases(jobs: int) -> Iterator[Case]:
    """All cases of the page, the longest first."""
    for count in reversed(ENGINES):
        for way in ("scattered", "assigned"):
            yield Case("giant", MANY, way, count, "harsh", jobs)
        yield Case("giant", MANY, "assigned", count, "none", jobs)
        if count in SMALL:
            for store in ("measured", "eight writers"):
                yield Case("small", MANY, "assigned", count, "harsh", jobs, store=store)
    for count in FEW:
        for load in LOADS:
            for way in ("scattered", "assigned"):
                yield Case("giant", load, way, count, "harsh", jobs // 10)


def checks() -> Iterator[tuple[Case, Case]]:
    """The same batch job by job, and in works as large as those of a million jobs."""
    for load in LOADS:
        for way in ("assigned", "scattered"):
            for count, failures in ((1, "none"), (10, "none"), (10, "hourly")):
                case = Case("giant", load, way, count, failures, CHECKED_JOBS, None)
                yield case, Case("giant", load, way, count, failures, CHECKED_JOBS, CHECKED_WORKS)


def row(case: Case, outcome: Outcome) -> dict[str, Any]:
    """A case as JSON."""
    return {
        **asdict(case),
        **asdict(outcome),
        "engine_hours": outcome.engine_hours,
        "wall_hours": outcome.wall_s / 3600,
        "engine_hours_per_million": outcome.engine_hours * 1e6 / outcome.jobs,
        "busy_share": outcome.busy_s / (outcome.engines * outcome.wall_s),
    }


def played(case: Case) -> dict[str, Any]:
    """Simulate a case in its own process."""
    began = time.perf_counter()
    policy.joined = quickly_joined  # millions of short-lived objects, of which only table rows remain
    gc.disable()  # collecting garbage would cost time and free nothing before the end
    made = row(case, simulate(case))
    gc.collect()
    took_s = time.perf_counter() - began
    print(
        f"{case.engine}, {case.load}, {case.way}, {case.engines} engines, failures {case.failures}, "
        f"store {case.store}: {made['engine_hours']:.0f} engine-hours, {took_s:.0f} s",
        file=sys.stderr,
    )
    return made


def night_rows() -> list[dict[str, Any]]:
    """Compare job files that were really run on one engine with their simulation, with the same jobs and no load."""
    made = []
    for night in recorded.nights():
        engine = recorded.small()
        bare = Recorded(engine.name, engine.rates, 0.0)
        all_kinds = kinds(night.load.removesuffix(" shuffled"), night.jobs, [night])
        outcome = Fleet(bare, Table(all_kinds, seed=None), 1, None, seed=None).run()
        measured_s = sorted(night.seconds)[len(night.seconds) // 2]
        made.append({"load": night.load, "jobs": night.jobs, "measured_s": measured_s, "predicted_s": outcome.wall_s})
    return made


def main() -> int:
    """Simulate and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="write only the page, from results/simulation.json")
    options = parser.parse_args()
    path = HERE / "results/simulation.json"
    if not options.page:
        began = time.perf_counter()
        with Pool(options.processes) as pool:
            pairs = list(checks())
            ones = pool.map(played, [each for pair in pairs for each in pair], chunksize=1)
            runs = pool.map(played, list(cases(options.jobs)), chunksize=1)
        digest = kinds(MANY, 48, recorded.nights())[0]
        document = {
            "figures": "predicted",
            "date": datetime.now(UTC).date().isoformat(),
            "jobs": options.jobs,
            "simulated_in_s": round(time.perf_counter() - began),
            "assumptions": {
                "lanes": LANES,
                "lease_s": LEASE_S,
                "renewed_s": RENEW_S,
                "tick_s": TICK_S,
                "store": asdict(recorded.store()),
                "disk_bytes_s": recorded.ASSUMED_DISK_BYTES_S,
                "hours_between_failures": FAILURES,
                "works": WORKS,
                "head_tokens": digest.path[0][1],
                "tail_tokens": digest.prompt_tokens,
                "engines": {name: asdict(engine_of(name)) for name in ("small", "giant")},
            },
            "nights": night_rows(),
            "checks": [{"by_job": one, "by_work": other} for one, other in zip(ones[::2], ones[1::2], strict=True)],
            "runs": sorted(runs, key=lambda run: [run[key] for key in ORDER]),
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    document = json.loads(path.read_text(encoding="utf-8"))
    docs = HERE.parent / "docs"
    (docs / "img/scale.svg").write_text(plot(document), encoding="utf-8")
    (docs / "scale.md").write_text(page(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
