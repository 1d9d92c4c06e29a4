"""The speeds that were measured on the H200 machine, as figures: the rows of docs/validation/h200-kimi-slice.

The version that measured them sampled one sequence after another; what that took is subtracted, because the present
version does it ten times faster.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from support.runs import Figure
from tokenmill.hardware import machine_file
from tokenmill.native.start import environment_of
from tokenmill.planner.speed.rates import standard
from tokenmill.tuner.search.forecasts import settings_with

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "validation" / "h200-kimi-slice"
SLOW_DRAW_NS = 0.6  # per token of the vocabulary


def h200_slice() -> Iterator[Figure]:
    """Every measured decode and prefill speed."""
    sys.path.insert(0, str(ROOT / "bench" / "gpu"))
    from prove_again import point_of, slice_profile
    from prove_plans import OUT, TAIL, cases
    from prove_rows import read

    machine, profile = machine_file.read(FOLDER / "machine.toml"), slice_profile()
    plans = {case.name: case.plan for case in cases(machine, profile)}
    rates = standard()
    drawing = (profile.vocabulary or 0) * (SLOW_DRAW_NS - rates.draw_ns) / rates.virtual_host * 1e-9
    for key, row in read([FOLDER], "speed").items():
        plan, point = plans[row["case"]], point_of(row)
        least = environment_of(plan).get("GGML_OP_OFFLOAD_MIN_BATCH")
        settings = settings_with(plan.settings, point.dials(plan))
        step = point.sequences / row["measured"]["decode"] - (point.sequences - 1) * drawing
        for kind, tok_s in (("decode", point.sequences / step), ("prefill", row["measured"]["prefill"])):
            yield Figure(
                case=f"slice, {row['case']}",
                group="H200",
                tier="h200",
                kind=kind,  # type: ignore[arg-type]
                low=tok_s,
                high=tok_s,
                machine=machine,
                profile=profile,
                settings=settings,
                placement=plan.placement,
                depth=point.head + TAIL + OUT // 2 if kind == "decode" else 0,
                sequences=point.sequences if kind == "decode" else 1,
                prompt=point.head if kind == "prefill" else None,
                min_batch=None if least is None else int(least),
                note=key,
            )
