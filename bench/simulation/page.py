"""Writes docs/scale.md: its text (scale.md.txt) with the figures of a simulation."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenmill.report.svg import figure_text

MANY = "four digests for each 48 jobs"
TEXT = Path(__file__).with_name("scale.md.txt")
Runs = dict[int, Any]
"""Runs by number of engines."""


def page(document: Any) -> str:
    """The whole page."""
    fields = _tables(document) | _where(document) | _checks(document) | _assumptions(document)
    return TEXT.read_text(encoding="utf-8").format(**fields)


def runs(
    document: Any,
    engine: str,
    load: str,
    way: str,
    failures: str,
    *,
    store: str = "measured",
    tenth: bool = False,
) -> Runs:
    """Runs of one line in a plot; `tenth`: with a tenth of the jobs."""
    wanted = (engine, load, way, failures, store, document["jobs"] // (10 if tenth else 1))
    keys = ("engine", "load", "way", "failures", "store", "jobs")
    return {run["engines"]: run for run in document["runs"] if tuple(run[key] for key in keys) == wanted}


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _cost(run: Any) -> str:
    return figure_text(run["engine_hours_per_million"])


def _percent(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:.1f} %"


def _tables(document: Any) -> dict[str, str]:
    assigned, scattered = (runs(document, "giant", MANY, way, "harsh") for way in ("assigned", "scattered"))
    none = runs(document, "giant", MANY, "assigned", "none")
    main = _table(
        (
            "engines",
            "shards: hours",
            "engine-hours",
            "without failures",
            "failures",
            "at random: hours",
            "engine-hours",
        ),
        (
            (
                count,
                figure_text(run["wall_hours"]),
                _cost(run),
                _cost(none[count]),
                run["failed"],
                figure_text(scattered[count]["wall_hours"]),
                _cost(scattered[count]),
            )
            for count, run in sorted(assigned.items())
        ),
    )
    counts = sorted(runs(document, "giant", "no sharing", "assigned", "harsh", tenth=True))
    loads = sorted({run["load"] for run in document["runs"]})
    others = _table(
        ("load", "jobs", *(f"{count} engine{'s' * (count > 1)}" for count in counts)),
        (
            (load, name, *(_cost(runs(document, "giant", load, way, "harsh", tenth=True)[count]) for count in counts))
            for load in loads
            for way, name in (("assigned", "by shards"), ("scattered", "at random"))
        ),
    )
    one, eight = (
        runs(document, "small", MANY, "assigned", "harsh", store=store) for store in ("measured", "eight writers")
    )
    small = _table(
        (
            "engines",
            "one writer: seconds",
            "engine-hours",
            "turns",
            "seconds of turns",
            "eight writers: seconds",
            "engine-hours",
        ),
        (
            (
                count,
                f"{run['wall_s']:,.0f}",
                _cost(run),
                f"{run['turns']:,}",
                f"{run['turns_s']:,.0f}",
                f"{eight[count]['wall_s']:,.0f}",
                _cost(eight[count]),
            )
            for count, run in sorted(one.items())
        ),
    )
    store = document["assumptions"]["store"]
    job_s = store["start_s"] + store["commit_s"]
    return {
        "main": main,
        "others": others,
        "small": small,
        "job_ms": f"{1000 * job_s:.2f}",
        "store_s": f"{document['jobs'] * job_s:,.0f}",
        "tenth": f"{document['jobs'] // 10:,}",
        "turns": _turns(document),
    }


def _turns(document: Any) -> str:
    none = runs(document, "giant", MANY, "assigned", "none")
    return _table(
        (
            "engines",
            "shards",
            "of these from others",
            "turns",
            "a turn takes",
            "hours of turns",
            "hours of writing",
            "hours in all",
        ),
        (
            (
                count,
                f"{run['stretches']:,}",
                f"{run['taken']:,}",
                f"{run['turns']:,}",
                f"{run['turns_s'] / run['turns']:.2f} s",
                figure_text(run["turns_s"] / 3600),
                figure_text(run["writing_s"] / 3600),
                figure_text(run["wall_hours"]),
            )
            for count, run in sorted(none.items())
        ),
    )


def _where(document: Any) -> dict[str, str]:
    """The additional cost of the most engines compared with one, by cause."""
    harsh, none = (runs(document, "giant", MANY, "assigned", how) for how in ("harsh", "none"))
    scattered = runs(document, "giant", MANY, "scattered", "harsh")
    one = min(none)
    most = max(none)
    few = sorted(none)[1]
    load_s = document["assumptions"]["engines"]["giant"]["load_s"]
    first = none[one]["engine_hours"]
    last = none[most]["engine_hours"]
    return {
        "most": str(most),
        "few": str(few),
        "date": document["date"],
        "heads": _percent(none[most]["computed_tokens"] / none[one]["computed_tokens"] - 1),
        "few_times": f"{scattered[few]['engine_hours'] / harsh[few]['engine_hours']:.1f} times",
        "most_times": f"{scattered[most]['engine_hours'] / harsh[most]['engine_hours']:.1f} times",
        "load_min": f"{load_s / 60:.1f}",
        "loading": figure_text((most - one) * load_s / 3600),
        "more": figure_text(last - first),
        "first": figure_text(first),
        "last": figure_text(last),
        "jobs_each": f"{document['jobs'] // most}",
        "lanes": str(document["assumptions"]["lanes"]),
        "harsh_most": _percent(harsh[most]["engine_hours"] / last - 1),
        "harsh_one": _percent(harsh[one]["engine_hours"] / first - 1),
        "turn_one": f"{document['assumptions']['store']['turns_s'][0][1]:.2f}",
        "turn_most": f"{document['assumptions']['store']['turns_s'][-1][1]:.2f}",
    }


def _checks(document: Any) -> dict[str, str]:
    nights = _table(
        ("load", "jobs", "measured s", "predicted s", "difference"),
        (
            (
                night["load"],
                night["jobs"],
                f"{night['measured_s']:.1f}",
                f"{night['predicted_s']:.1f}",
                f"{100 * (night['predicted_s'] / night['measured_s'] - 1):+.0f} %",
            )
            for night in document["nights"]
        ),
    )
    pairs = [(check["by_job"], check["by_work"]) for check in document["checks"]]

    def worst(figure: str, *, failed: tuple[bool, ...]) -> str:
        own = [abs(work[figure] / job[figure] - 1) for job, work in pairs if (job["failed"] > 0) in failed]
        return _percent(max(own)) if own else "nothing"

    return {
        "nights": nights,
        "works": f"{document['assumptions']['works']:,}",
        "checked_jobs": f"{pairs[0][0]['jobs']:,}",
        "quiet": worst("wall_s", failed=(False,)),
        "rough": worst("wall_s", failed=(True,)),
        "tokens": worst("computed_tokens", failed=(True, False)),
        "failing": str(sum(job["failed"] > 0 for job, _ in pairs)),
        "pairs": str(len(pairs)),
    }


def _assumptions(document: Any) -> dict[str, str]:
    own = document["assumptions"]
    giant = own["engines"]["giant"]
    small = own["engines"]["small"]
    (giant_one, giant_all), (small_one, small_all) = (
        (engine["rates"]["decode_tok_s"][0][1], engine["rates"]["decode_tok_s"][-1][1]) for engine in (giant, small)
    )
    return {
        "giant_prefill": f"{giant['rates']['prefill_tok_s']}",
        "giant_decode": f"{giant_one}",
        "giant_lanes": f"{giant_all / giant_one:.2f}",
        "giant_load": f"{giant['load_s']:.0f}",
        "disk": f"{own['disk_bytes_s'] / 1e9:g}",
        "small_one": f"{small_one:.0f}",
        "small_all": f"{small_all:.0f}",
        "small_prefill": f"{small['rates']['prefill_tok_s']:.0f}",
        "small_load": f"{small['load_s']:.1f}",
        "head": f"{own['head_tokens']:.0f}",
        "tail": f"{own['tail_tokens']:.0f}",
        "lease": f"{own['lease_s']:.0f}",
        "renewed": f"{own['renewed_s']:.0f}",
        "tick": f"{own['tick_s']:.0f}",
        "start_16": f"{16000 * own['store']['start_s']:.0f}",
        "commit_16": f"{16000 * own['store']['commit_s']:.1f}",
        "harsh": f"{own['hours_between_failures']['harsh']:.0f}",
        "hourly": f"{own['hours_between_failures']['hourly']:.0f}",
    }
