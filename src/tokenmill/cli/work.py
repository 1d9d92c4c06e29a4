"""`tokenmill work`: one more worker on the batches of a store on PostgreSQL."""

from pathlib import Path
from typing import Any

from tokenmill.api.batch_engine import EngineSetup
from tokenmill.api.engines import choose_engine
from tokenmill.api.run_options import RunOptions
from tokenmill.api.stores import store_address
from tokenmill.api.summary import WorkSummary
from tokenmill.api.workers import WorkRequest, work_batches
from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common, facts, say, show, show_json
from tokenmill.cli.progress import shown_progress
from tokenmill.cli.signals import SignalStop
from tokenmill.errors import UsageError
from tokenmill.jobs.worker.retries import MOST_ATTEMPTS
from tokenmill.units import format_seconds, number_of


def work(
    *,
    model: str | None = None,
    store: str | None = None,
    stay: bool = False,
    attempts: int = MOST_ATTEMPTS,
    job_timeout: float | None = None,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Work on the batches of a store on PostgreSQL, beside the runners on other hosts.

    Batches come from `tokenmill run --store postgresql://...`, which also writes their results, on its own host. Every
    runner takes those that ask for its model. Jobs with a common beginning go to as few runners as possible, and those
    that are too long for one to those with a larger --context. Ends when all batches are done: while other runners have
    all that is left, it waits, and does what one of them had at work that is lost.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model; default: smollm2. It must be the
        very model that the batches were begun with; where its file lies does not matter.
    store:
        postgresql://user@host/database; default: store in the configuration. A password is better left to
        ~/.pgpass or PGPASSWORD: others on this host can read what is on a command line.
    stay:
        Wait for more batches when all are done; Ctrl-C ends it.
    attempts:
        How often a job is tried that fails for reasons that can pass; default: 3.
    job_timeout:
        Seconds that one attempt may take, for lines that do not say.
    """
    run_options = RunOptions(attempts=attempts, job_timeout_s=job_timeout)
    run_options.check()
    config = common.load_config()
    address = store_address(store, config)
    if isinstance(address, Path):
        raise UsageError(
            f"only one process can work on the batches in a folder ({address})",
            hint="--store postgresql://user@host/database, as tokenmill run was given",
        )
    stop = SignalStop()
    with shown_progress() as on_progress:
        setup = EngineSetup(choose_engine(model, options, config, on_progress), options, config)
        done = work_batches(WorkRequest(address, run_options, stay), setup, stop, on_progress)
    _show(done, stop, common)
    return stop.code


def _show(done: WorkSummary, stop: SignalStop, common: Common) -> None:
    if not done.reports and not stop.code:
        say("there is nothing to do yet for this model\nhint: --stay waits for batches; tokenmill status lists them")
    if common.json:
        show_json(document(done))
        return
    if not done.reports:
        return
    worked = f"on {number_of(len(done.batches), 'batch', 'batches')} for {format_seconds(done.seconds)}"
    rows = {
        "worked": worked,
        "answers": f"{done.computed:,} were computed here",
        "prompts": f"{done.reused_tokens:,} tokens reused, {done.computed_prompt_tokens:,} computed",
        "written": f"{done.generated_tokens:,} tokens",
    }
    show(facts(rows))


def document(done: WorkSummary) -> dict[str, Any]:
    """What one worker did, as JSON."""
    return {
        "batches": list(done.batches),
        "computed": done.computed,
        "reused_tokens": done.reused_tokens,
        "computed_prompt_tokens": done.computed_prompt_tokens,
        "generated_tokens": done.generated_tokens,
        "engine_deaths": done.engine_deaths,
        "seconds": round(done.seconds, 3),
        "end": done.end,
    }
