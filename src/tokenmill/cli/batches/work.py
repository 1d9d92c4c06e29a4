"""`tokenmill work`: runs one more worker for the batches in a PostgreSQL store."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.api.engines.batch import EngineSetup
from tokenmill.api.engines.choose import choose_engine
from tokenmill.api.run_options import RunOptions
from tokenmill.api.stores import store_address
from tokenmill.api.summary import WorkSummary
from tokenmill.api.workers import WorkRequest, work_batches
from tokenmill.cli.options import EngineFlags, Model
from tokenmill.cli.output import Common, facts, say, show, show_json
from tokenmill.cli.progress import shown_progress
from tokenmill.cli.signals import SignalStop
from tokenmill.errors import UsageError
from tokenmill.jobs.worker.retries import MAX_ATTEMPTS
from tokenmill.units import format_seconds, number_of


def work(
    *,
    model: Model = None,
    store: Annotated[str | None, Parameter(metavar="URL")] = None,
    stay: bool = False,
    attempts: Annotated[int, Parameter(metavar="N")] = MAX_ATTEMPTS,
    job_timeout: Annotated[float | None, Parameter(metavar="SECONDS")] = None,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Run jobs of the batches in a PostgreSQL store, next to workers on other hosts.

    `tokenmill run --store postgresql://...` creates the batches and writes their results on its own host. Each worker
    takes jobs that ask for its model; jobs that share a prefix go to as few workers as possible, and long jobs to
    workers with a large --context. Exits when all batches are done; if a worker is lost, the others take over its jobs.

        tokenmill work --store postgresql://mill@db/batches --model kimi.gguf --stay

    Parameters
    ----------
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model; must be the same model file as that of the
        batches, wherever it is stored. [default: smollm2]
    store:
        Batch store: postgresql://USER@HOST/DATABASE. Other users can see command lines, so keep the password in
        ~/.pgpass or PGPASSWORD. [default: from the configuration]
    stay:
        Wait for new batches when all are done, until Ctrl-C.
    attempts:
        Maximum attempts for retryable failures.
    job_timeout:
        Time limit of one attempt, for jobs that do not set one. [default: no limit]
    """
    run_options = RunOptions(attempts=attempts, job_timeout_s=job_timeout)
    run_options.check()
    config = common.load_config()
    address = store_address(store, config)
    if isinstance(address, Path):
        raise UsageError(
            f"only one process can use a batch store in a folder ({address})",
            hint="use --store postgresql://USER@HOST/DATABASE, as for tokenmill run",
        )
    stop = SignalStop()
    with shown_progress() as on_progress:
        setup = EngineSetup(choose_engine(model, options, config, on_progress), options, config)
        done = work_batches(WorkRequest(address, run_options, stay), setup, stop, on_progress)
    _show(done, stop, common)
    return stop.code


def _show(done: WorkSummary, stop: SignalStop, common: Common) -> None:
    if not done.reports and not stop.code:
        say("no batches for this model\nhint: --stay waits for batches; tokenmill status lists them")
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
    """The JSON output of `tokenmill work`."""
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
