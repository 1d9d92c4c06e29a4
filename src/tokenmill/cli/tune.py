"""`tokenmill tune`: parses the options, runs the tuning of `tokenmill.api.tuning`, and shows the operating point."""

import asyncio

from tokenmill.api.tune_options import TuneOptions
from tokenmill.api.tuning import Tuning, prepare_tuning
from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common, show, show_json, show_text
from tokenmill.cli.progress import load_shown
from tokenmill.cli.signals import CancelOnSignals
from tokenmill.cli.views.tune import outcome_shown
from tokenmill.tuner.point import AimKind, OperatingPoint

INTERRUPTED = 130


def tune(
    model: str,
    /,
    *,
    aim: AimKind = "throughput",
    first_token: str | None = None,
    within: str = "10%",
    jobs: str | None = None,
    head_tokens: int = 512,
    tail_tokens: int = 64,
    output_tokens: int = 64,
    trials: int | None = None,
    trial_seconds: float = 5.0,
    fresh: bool = False,
    busy: bool = False,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Find the best settings for a model on this machine by measuring, in one load where the engine allows.

    Threads, sequences, micro-batch, cache types, flash attention and context are turned on the running native engine;
    servers are started again, as seldom as can be. What is given as an option stays as it is. The point is saved, and
    plan, run and serve use it for what they are not told otherwise. Ctrl-C keeps every trial: the same command goes on.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model, such as smollm2.
    aim:
        What is best: throughput (most tokens of a batch), latency (the same while an interactive request's first token
        comes within --first-token), cores (fewest threads within --within of the best), context (most context within
        --within of the best), or energy (least for each token).
    first_token:
        With --aim latency: the most that an interactive request may wait beside a batch, such as 2s or 500ms.
    within:
        With --aim cores and context: the share of the best throughput that may be given up; default: 10%.
    jobs:
        A file of jobs like those to come, to measure with; default: prompts drawn from the model's vocabulary.
    head_tokens:
        Of drawn prompts: tokens at the beginning that all jobs share; default: 512.
    tail_tokens:
        Tokens of a prompt that are its own; default: 64.
    output_tokens:
        Tokens of an answer; default: 64.
    trials:
        At most so many; default: as many as it takes, within a share of what trying everything would.
    trial_seconds:
        How long each trial measures; default: 5.
    fresh:
        Forget trials of the same model, machine and build; default: they count, and are not made again.
    busy:
        Count trials although other processes use the machine: for one that is never quiet.
    """
    asked = TuneOptions(
        aim=aim,
        first_token=first_token,
        within=within,
        jobs=jobs,
        head_tokens=head_tokens,
        tail_tokens=tail_tokens,
        output_tokens=output_tokens,
        trials=trials,
        trial_seconds=trial_seconds,
        fresh=fresh,
        busy=busy,
    )
    tuning = prepare_tuning(model, asked, options, common.load_config())
    signals = CancelOnSignals()
    try:
        found = asyncio.run(_run(tuning, signals))
    except asyncio.CancelledError:
        tuning.log_stopped()
        return signals.code or INTERRUPTED
    if common.json:
        show_json(found)
    else:
        show(*outcome_shown(found, tuning.reason))
        show_text(str(tuning.path))
    return 0


async def _run(tuning: Tuning, signals: CancelOnSignals) -> OperatingPoint:
    signals.begin()
    return await tuning.run(load_shown)
