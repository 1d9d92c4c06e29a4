"""`tokenmill tune`: finds the best engine settings by measurement and shows the operating point."""

import asyncio
from typing import Annotated

from cyclopts import Parameter

from tokenmill.api.tune_options import TuneOptions
from tokenmill.api.tuning import Tuning, prepare_tuning
from tokenmill.cli.options import EngineFlags, RequiredModel, TokenCount
from tokenmill.cli.output import Common, show, show_json, show_text
from tokenmill.cli.progress import load_shown
from tokenmill.cli.signals import CancelOnSignals
from tokenmill.cli.views.tune import outcome_shown
from tokenmill.tuner.point import AimKind, OperatingPoint

INTERRUPTED = 130


def tune(
    model: RequiredModel,
    *,
    aim: AimKind = "throughput",
    first_token: Annotated[str | None, Parameter(metavar="TIME")] = None,
    within: Annotated[str, Parameter(metavar="SHARE")] = "10%",
    jobs: Annotated[str | None, Parameter(metavar="FILE")] = None,
    prefix_tokens: TokenCount = 512,
    own_tokens: TokenCount = 64,
    answer_tokens: TokenCount = 64,
    trials: int | None = None,
    trial_seconds: Annotated[float, Parameter(metavar="SECONDS")] = 5.0,
    fresh: bool = False,
    busy: bool = False,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Find the best settings for a model on this machine by measurement, and save them as its operating point.

    The native engine changes threads, sequences, micro-batch size, cache types, flash attention and context without
    reloading the model; servers are restarted as rarely as possible. Settings given as options are kept as they are.
    plan, run and serve use the operating point for settings that are not given. Safe to interrupt: trials are kept, and
    the same command resumes.

        tokenmill tune kimi.gguf --jobs jobs.jsonl
        tokenmill tune kimi.gguf --aim latency --first-token 2s

    Parameters
    ----------
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model such as smollm2.
    aim:
        Objective: throughput (of a batch), latency (throughput with the first token of interactive requests within
        --first-token), cores (fewest threads within --within of the best), context (longest context within --within of
        the best) or energy (per token).
    first_token:
        With --aim latency: maximum time to the first token of an interactive request during a batch, such as 2s or
        500ms.
    within:
        With --aim cores or context: share of the best throughput that may be lost.
    jobs:
        Job file with typical jobs to measure. [default: random prompts from the model's vocabulary]
    prefix_tokens:
        Tokens of the prefix that all random prompts share.
    own_tokens:
        Tokens of a random prompt after the shared prefix.
    answer_tokens:
        Tokens generated per random prompt.
    trials:
        Maximum number of trials. [default: as many as needed, up to a share of all combinations]
    trial_seconds:
        Duration of each trial.
    fresh:
        Ignore earlier trials of the same model, machine and build.
    busy:
        Accept trials that were disturbed by other processes, for machines that are never idle.
    """
    asked = TuneOptions(
        aim=aim,
        first_token=first_token,
        within=within,
        jobs=jobs,
        prefix_tokens=prefix_tokens,
        own_tokens=own_tokens,
        answer_tokens=answer_tokens,
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
