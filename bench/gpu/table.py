"""Tables of the measurements of bench/gpu/prove.py, for docs/validation.

    python bench/gpu/table.py ROWS [ROWS ...] --name h200 [--docs docs/validation] [--raw proof.tar.gz]
                              [--summary docs/validation/README.md] [--again machine.toml]

ROWS are folders of JSON lines: a run's `rows`, or its output folder; of several, the latest measurements are used.
Writes <docs>/<name>.md and, with --raw, copies the archive of rows and logs next to it. --summary writes a short table
between the marks `<!-- measured -->` and `<!-- /measured -->` of a page in the same folder; otherwise the table is
printed. --again repeats the predictions with the present version for the given machine, and states it. Measurements
without a GPU are only printed.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prove_again import Again, slice_profile
from prove_judge import AGAINST_ONE, AGAINST_UNTUNED, Verdict, batches, device_totals, holds, speeds, summary, within
from prove_plans import CARD_12
from prove_rows import STAGES, Row, read

from tokenmill.hardware import machine_file
from tokenmill.units import GIB, MIB

SERVER = "llama-server"
Tables = dict[str, dict[str, Row]]
DIALS = ("sequences", "threads", "threads_batch", "ubatch")
UNTUNED = (
    "Servers are measured for a limited time, in which tokens of unfinished answers count; the native engine runs the "
    "whole file. The untuned -np 32 gets the jobs without their digest, which it would compute for minutes, so that it "
    "is faster than with it."
)
KINDS = ("decode", "prefill")
MARKS = "<!-- measured -->", "<!-- /measured -->"
AGAIN = (
    "Predictions are those of the present version, which has learned from these very measurements; README.md says\n"
    "what. What was predicted before them is in the raw rows."
)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table; empty without rows."""
    if not rows:
        return ["Nothing was measured.", ""]
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines] + [""]


def met(value: bool | None) -> str:
    """A value in a cell."""
    return "" if value is None else "yes" if value else "**no**"


def mib(value: float | None) -> str:
    """Bytes in a cell."""
    return "" if value is None else f"{value / MIB:.1f}"


def number(value: float | None) -> str:
    """A speed in a cell."""
    return "" if value is None else f"{value:.4g}"


def ratio(predicted: float | None, measured: float | None) -> str:
    """Predicted over measured."""
    return "" if predicted is None or not measured else f"{predicted / measured:.3f}"


def facts(found: Tables) -> list[str]:
    """Machine, build, date."""
    about = found["build"].get("about", {})
    made = found["build"].get("build", {})
    cut = found["slice"].get("slice", {})
    ledgers = [row for row in found["ledger"].values() if row.get("build")]
    cards = ", ".join(f"{gpu['name']} ({(gpu['vram_bytes'] or 0) / GIB:.0f} GiB)" for gpu in about.get("gpus", []))
    rows = [
        ("date", str(about.get("date", ""))[:16].replace("T", " ")),
        ("card, driver", f"{cards or 'none'}; {about.get('driver') or 'no driver'}"),
        ("processors", f"{about.get('cpu') or 'unnamed'}, {about.get('cores')} cores"),
        ("system", f"{about.get('os')}, {about.get('virtual') or 'no hypervisor'}"),
        ("memory", f"{(about.get('dram_bytes') or 0) / GIB:.0f} GiB"),
        ("engine", next((row["build"] for row in ledgers), "")),
        ("built", f"{made.get('seconds', 0):.0f} s, sm_{made.get('cuda')}" if made else "elsewhere"),
        ("model", f"{cut.get('bytes', 0) / GIB:.2f} GiB, {cut.get('layers')} layers of Kimi-K2.5, random weights"),
    ]
    return table(("", ""), rows)


def targets(found: Tables) -> list[tuple[str, list[Verdict]]]:
    """Every target with its comparisons."""
    spoken = speeds(found["speed"].values())
    compared = batches(found["batch"].values())
    devices = device_totals(found["ledger"].values())
    words = "memory of a device within 2 %, never more than 200 MiB under"
    return [
        (words, [one for one in devices if not one.what.startswith(SERVER)]),
        (f"{SERVER}: the same", [one for one in devices if one.what.startswith(SERVER)]),
        ("decode within 25 % before any run", spoken["decode before"]),
        ("decode within 15 % after one run of each plan", spoken["decode after"]),
        ("prefill within 30 % before any run", spoken["prefill"]),
        (
            f"batch at the tuned point at least {AGAINST_ONE:g} times -np 1",
            [one for one in compared if one.what.endswith("-np 1")],
        ),
        (
            f"batch at the tuned point at least {AGAINST_UNTUNED:g} times an untuned -np 32",
            [one for one in compared if one.what.endswith("untuned")],
        ),
    ]


def target_table(found: Tables) -> list[str]:
    """How many comparisons meet each target."""
    rows = []
    for words, verdicts in targets(found):
        good, judged, middle, worst = summary(verdicts)
        ours = words.startswith("batch")
        shown = ", ".join(f"{one.ratio:.2f}" for one in verdicts if one.ratio) if ours else ""
        rows.append((words, f"{good} of {judged}", shown or _share(middle), "" if ours else _share(worst)))
    return table(("target", "met", "median error, or times", "worst"), rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def memory(found: Tables) -> list[str]:
    """Every item of every ledger, then the driver's totals at each point."""
    rows: list[tuple[object, ...]] = []
    failed = []
    for row in found["ledger"].values():
        if "error" in row:
            failed.append(f"{row.get('case', row['key'])}: {row['error']}")
            continue
        settings = row.get("settings", {})
        words = (
            f"{row.get('case')}, {settings.get('sequences')} x {settings.get('context')}, ub {settings.get('ubatch')}"
        )
        for item in row.get("rows", []):
            ours = item["predicted_bytes"]
            theirs = item["measured_bytes"]
            judged = holds(ours, theirs) if item["item"] == "total" else None
            rows.append(
                (
                    words,
                    item["tier"],
                    item["item"],
                    item["source"],
                    mib(ours),
                    mib(theirs),
                    ratio(ours, theirs),
                    met(judged),
                )
            )
            words = ""
    lines = table(("plan", "in", "item", "by", "predicted, MiB", "measured, MiB", "ratio", "target met"), rows)
    devices = [
        (one.what, mib(one.predicted), mib(one.measured), ratio(one.predicted, one.measured), met(one.met))
        for one in device_totals(found["ledger"].values())
    ]
    lines += ["Each device as a whole, by the driver where it says, else by the engine's buffers:", ""]
    lines += table(("plan, device", "predicted, MiB", "measured, MiB", "ratio", "target met"), devices)
    points = [
        (
            row["case"],
            row["point"],
            mib(row["vram_predicted"].get(tier)),
            mib(size),
            ratio(row["vram_predicted"].get(tier), size),
            met(holds(row["vram_predicted"].get(tier) or 0, size)),
        )
        for row in found["speed"].values()
        if "measured" in row
        for tier, size in row["vram"].items()
    ]
    if points:
        lines += ["The process on the card at every point of the speeds below, by the driver:", ""]
        lines += table(("plan", "point", "predicted, MiB", "measured, MiB", "ratio", "target met"), points)
    return lines + [f"- {text}" for text in failed] + ([""] if failed else [])


def speed(found: Tables, kind: str) -> list[str]:
    """One kind of speed at every point."""
    rows = []
    for row in found["speed"].values():
        if "measured" not in row or row["measured"].get(kind) is None:
            continue
        measured = row["measured"][kind]
        dials = row["dials"]
        before = (row["before"] or {}).get(kind)
        after = (row["after"] or {}).get(kind)
        first = row["axis"] == "first"
        limits = (0.25, 0.15) if kind == "decode" else (0.30, 0.30)
        rows.append(
            (
                row["case"],
                row["axis"],
                dials["threads"],
                dials["sequences"],
                dials["ubatch"],
                row["head"],
                number(before),
                number(None if first else after),
                number(measured),
                ratio(before, measured),
                "" if first else ratio(after, measured),
                met(within(before, measured, limits[0])),
                "" if first else met(within(after, measured, limits[1])),
            )
        )
    return table(
        (
            "plan",
            "by",
            "threads",
            "sequences",
            "ubatch",
            "depth",
            "predicted",
            "after one run",
            "measured, tok/s",
            "ratio",
            "after",
            "within, before",
            "after",
        ),
        rows,
    )


def loads(found: Tables) -> list[str]:
    """Load times."""
    rows = []
    for row in found["ledger"].values():
        if "load_s" in row:
            said = row.get("load_warm_s")
            took = row["load_s"]
            rows.append((row["case"], number(said), number(took), ratio(said, took)))
    return table(("plan", "predicted with the file in the page cache, s", "measured, s", "ratio"), rows)


def tuned(found: Tables) -> list[str]:
    """The operating point and every trial."""
    point, stopped = (found["tune"].get("point", {}).get(name) for name in ("point", "stopped"))
    lines = []
    trials = [row for key, row in found["tune"].items() if key.startswith("trial")]
    trials.sort(key=lambda row: tuple(row["dials"][name] for name in DIALS))
    if point:
        dials = point["dials"]
        seconds = sum(row["seconds"] for row in trials)
        how = f"the best of {len(trials)} trials when the time was over," if stopped else "found"
        lines += [
            f"{dials['threads']} threads ({dials['threads_batch']} for prefill), {dials['sequences']} sequences, "
            f"ubatch {dials['ubatch']}: {number(point['figures']['jobs_tok_s'])} tok/s of a batch, {how} in "
            f"{seconds:.0f} s and {point['loads']} load(s). {point['knee']}.",
            "",
        ]
    rows = [
        (
            *(row["dials"][name] for name in DIALS),
            number(row["figures"]["decode_tok_s"]),
            number(row["figures"]["jobs_tok_s"]),
            row["outcome"],
        )
        for row in trials
    ]
    head = ("sequences", "threads", "for prefill", "ubatch", "decode, tok/s", "batch, tok/s", "outcome")
    return lines + table(head, rows)


def batch(found: Tables) -> list[str]:
    """Throughput of all ways."""
    rows = [
        (
            row["load"],
            row["way"],
            row["lanes"],
            number(row["tok_s"]),
            row["written"],
            f"{row['seconds']:.1f}",
            row["computed"],
            row["jobs"],
        )
        for row in found["batch"].values()
        if "tok_s" in row
    ]
    head = ("load", "engine", "sequences", "tok/s", "tokens generated", "s", "prompt tokens computed", "finished jobs")
    lines = table(head, sorted(rows, key=lambda row: str(row[0]), reverse=True))
    ratios = [
        (one.what, f"{one.ratio:.2f}", one.target, met(one.met))
        for one in batches(found["batch"].values())
        if one.ratio is not None
    ]
    lines += table(("", "times", "target", "met"), ratios)
    if any("untuned" in str(row.get("way")) for row in found["batch"].values()):
        lines += [UNTUNED, ""]
    return lines + [f"- {row['way']}: {row['error']}\n" for row in found["batch"].values() if "error" in row]


def digest(found: Tables) -> list[str]:
    """Sequences with a shared digest."""
    said = found["digest"].get("predicted", {})
    shared = found["digest"].get("shared", {})
    rows: list[tuple[object, ...]] = []
    for name in ("slots that there is room for", "slots for all"):
        row = found["digest"].get(name)
        if row:
            rows.append(
                (
                    f"llama-server -np {row['slots']}",
                    row["slots"] * said["context"],
                    mib(row["kv_predicted_bytes"]),
                    "",
                    "yes" if row["predicted_fits"] else "no",
                    row["outcome"],
                )
            )
    if shared:
        rows.append(
            (
                f"native, {shared['sequences']} sequences",
                shared["cells_total"],
                mib(shared["kv_predicted_bytes"]),
                mib(shared["kv_bytes"]),
                "yes",
                f"{shared['running']} in flight, {shared['cells_used']} cells used, {shared['cached_least']} tokens "
                f"of each prompt reused, {number(shared['tok_s'])} tok/s",
            )
        )
    words = ""
    if said.get("slots") is not None:
        slots = said["slots"]
        context = said["context"]
        words = f"Weights and buffers leave room for the KV of {slots} slots of {context} tokens.\n"
    return [
        words,
        *table(("", "cells", "KV predicted, MiB", "measured, MiB", "fits by the ledger", "result"), rows),
    ]


def page(found: Tables, name: str, again: str = "") -> str:
    """The whole page."""
    skipped = [
        f"- {row['case']}, {row['point']}: {row['skipped']}" for row in found["speed"].values() if "skipped" in row
    ]
    skipped += [
        f"- {stage}, {row['key']}: {row['error']}"
        for stage in STAGES
        for row in found[stage].values()
        if "error" in row
    ]
    parts = [
        f"# Predicted against measured: {name}",
        "",
        "Made by `bench/gpu/prove.py` and `bench/gpu/table.py`; [README.md](README.md) describes the method.",
        "A ratio is predicted over measured. The first point of a plan calibrates its forecast and is not judged after",
        "that.",
        "",
        *([again, ""] if again else []),
        *facts(found),
        "## Targets",
        "",
        *target_table(found),
        "## Memory",
        "",
        *memory(found),
        "## Decode",
        "",
        *speed(found, "decode"),
        "## Prefill",
        "",
        *speed(found, "prefill"),
        "## Loads",
        "",
        *loads(found),
        "## The operating point",
        "",
        f"`tokenmill tune`, all experts in host memory (the plan of {CARD_12}).",
        "",
        *tuned(found),
        "## Batches with shared digests",
        "",
        "Experts in host memory; llama-server with the options that users choose.",
        "",
        *batch(found),
        "## One long digest on a small card",
        "",
        *digest(found),
        *(["## Not measured", "", *skipped, ""] if skipped else []),
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def summary_table(found: Tables, name: str) -> str:
    """Predictions and measurements of every plan, then batches, without servers that finished no job."""
    devices = {one.what: one for one in device_totals(found["ledger"].values())}
    firsts = {row["case"]: row for row in found["speed"].values() if row.get("axis") == "first" and "measured" in row}
    rows = []
    for case in (row["case"] for row in found["ledger"].values() if "rows" in row):
        card = devices.get(f"{case}, gpu0")
        row = firsts.get(case)
        if card is not None and row is not None:
            memory_ = f"{(card.predicted or 0) / MIB:.0f} / {(card.measured or 0) / MIB:.0f}"
            speeds_ = (f"{number(row['before'][kind])} / {number(row['measured'][kind])}" for kind in KINDS)
            rows.append((f"[{case}]({name}.md)", memory_, *speeds_))
    head = ("predicted / measured", "GPU memory, MiB", *(f"{kind}, tok/s" for kind in KINDS))
    lines = table(head, rows)
    compared = [
        (one.what, f"{number(one.predicted)} tok/s", f"{number(one.measured)} tok/s", f"{one.ratio:.2f}")
        for one in batches(row for row in found["batch"].values() if row.get("jobs") != 0)
        if one.ratio is not None
    ]
    if compared:
        lines += table(("experts in host memory", "tokenmill", "llama-server", "speed-up"), compared)
    return "\n".join(lines)


def load(folders: Sequence[Path]) -> Tables:
    """Rows by stage and key."""
    return {stage: read(folders, stage) for stage in STAGES}


def put_into(text: str, lines: str) -> str | None:
    """A text with new lines between its marks; None if it has no marks."""
    begin, end = MARKS
    if begin not in text or end not in text:
        return None
    return text.partition(begin)[0] + f"{begin}\n{lines}\n{end}" + text.partition(end)[2]


def main() -> int:
    """Write or print the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--name", required=True)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--again", type=Path, metavar="MACHINE", help="repeat the predictions for this machine file")
    given: Any = parser.parse_args()
    found = load(given.rows)
    if given.again is not None:
        found = Again(machine_file.read(given.again), slice_profile()).tables(found)
    text = page(found, given.name, AGAIN if given.again else "")
    if given.docs is None:
        print(text)
    elif found["build"].get("about", {}).get("cpu_only", True):
        print("error: measured without a card: that goes nowhere but to the screen", file=sys.stderr)
        return 2
    else:
        given.docs.mkdir(parents=True, exist_ok=True)
        (given.docs / f"{given.name}.md").write_text(text, encoding="utf-8")
        if given.raw is not None:
            shutil.copyfile(given.raw, given.docs / f"{given.name}-raw.tar.gz")
    lines = summary_table(found, given.name)
    if given.summary is None:
        print(lines)
        return 0
    changed = put_into(given.summary.read_text(encoding="utf-8"), lines.rstrip())
    if changed is None:
        print(f"error: {given.summary} has no {MARKS[0]} and {MARKS[1]}", file=sys.stderr)
        return 2
    given.summary.write_text(changed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
