"""How fast the stages of recipes went on this machine, kept for the next forecast: `<state>/measured/stages.jsonl`.

Beside the history of benchmarks, not in it: what was worked on here was whatever the recipes asked for, other programs
may have used the machine, and forecasts of plans are not to be corrected by that. Kept as loads are
(engine/measured.py); no prompts, no paths.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tokenmill.engine import measured
from tokenmill.errors import EngineError
from tokenmill.hardware.machine import Machine
from tokenmill.jobs.expected import Rates
from tokenmill.jobs.progress import Report
from tokenmill.recipes.estimate import Speeds
from tokenmill.recipes.runner import Origin
from tokenmill.units import number_of

FILE = Path("measured", "stages.jsonl")
LEAST_TOKENS = 64  # computed and written: of fewer, no rate is told
MOST_STAGES = 16  # that a rate is told from: the newest


@dataclass(frozen=True, slots=True)
class Pace:
    """One stage that was worked on."""

    when: str  # ISO 8601, UTC
    machine_id: str
    model_id: str
    engine: str  # native, llama-server, ...
    build: str
    answers: int
    lanes: float  # at work on average
    computed_tokens: int  # of prompts
    prefill_tok_s: float
    written_tokens: int
    decode_tok_s: float  # all lanes together


def pace_of(report: Report, origin: Origin, machine: Machine, when: datetime) -> Pace | None:
    """What a stage tells of speeds; None: too little."""
    rates = report.rates
    tokens = report.tokens
    decode = rates.decode_at(1)  # a report has one rate, at the width that it went on with
    if not rates.prefill_tok_s or not decode or min(tokens.computed, tokens.generated) < LEAST_TOKENS:
        return None
    return Pace(
        when.astimezone(UTC).isoformat(timespec="seconds"),
        measured.machine_id(machine),
        origin.model_id,
        origin.engine,
        origin.build,
        report.answers,
        round(report.lanes, 3),
        tokens.computed,
        rates.prefill_tok_s,
        tokens.generated,
        decode,
    )


def keeper(state: Path, machine: Machine, origin: Callable[[], Origin]) -> Callable[[Report], None]:
    """Keeps what stages tell; a disk that takes nothing is no reason to end a recipe."""

    def keep(report: Report) -> None:
        pace = pace_of(report, origin(), machine, datetime.now(UTC))
        if pace is not None:
            with suppress(EngineError):
                measured.append_line(state / FILE, asdict(pace))

    return keep


def paces(state: Path, *, machine: Machine, model_id: str, engine: str, build: str | None) -> list[Pace]:
    """Stages of a model with an engine on a machine, oldest first; `build` None: of the one that was used last."""
    here = measured.machine_id(machine), model_id, engine
    found = [
        pace
        for pace in measured.read_lines(state / FILE, Pace)
        if (pace.machine_id, pace.model_id, pace.engine) == here
    ]
    last = build if build is not None else next((pace.build for pace in reversed(found)), None)
    return [pace for pace in found if pace.build == last]


def from_paces(found: Sequence[Pace]) -> Speeds | None:
    """Mean speeds of the newest stages; None: there are none."""
    newest = found[-MOST_STAGES:]
    if not newest:
        return None
    computed = sum(pace.computed_tokens for pace in newest)
    written = sum(pace.written_tokens for pace in newest)
    prefill_s = sum(pace.computed_tokens / pace.prefill_tok_s for pace in newest)
    decode_s = sum(pace.written_tokens / pace.decode_tok_s for pace in newest)
    lanes = max(1, round(sum(pace.lanes * pace.written_tokens for pace in newest) / written))
    rate = written / decode_s
    answers = number_of(sum(pace.answers for pace in newest), "answer")
    words = f"measured by {answers} here up to {newest[-1].when[:10]} with {newest[-1].build}"
    # One lane alone has at least its share.
    points = ((1, rate),) if lanes == 1 else ((1, rate / lanes), (lanes, rate))
    return Speeds(Rates(computed / prefill_s, points), lanes, measured=True, words=words, confidence="measured")
