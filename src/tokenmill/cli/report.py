"""`tokenmill report`: all that is known of a machine and a model, as one page."""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokenmill.api.engines import DEFAULT_MODEL
from tokenmill.api.options import ENGINES
from tokenmill.api.planning import locate, plan_engine
from tokenmill.api.stores import store_address
from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common, say, show_json, show_text
from tokenmill.config import Config
from tokenmill.engine import load_history
from tokenmill.errors import FlagUnknown, ModelError, NotSpellable, UsageError
from tokenmill.hardware.catalog import find, names
from tokenmill.launch import spell
from tokenmill.launch.files.launch import grouped
from tokenmill.launch.files.services import joined, words
from tokenmill.model.identity import identity_of
from tokenmill.model.pull.store import pulled
from tokenmill.model.read import read
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.report.collect import Subject, collect
from tokenmill.report.render import GENERATOR, MARK, markdown, page
from tokenmill.report.report import CommandText, ReportPage
from tokenmill.storage.atomic import new_file
from tokenmill.tuner import history

_NOT_SAID = ("engine", "binary", "port", "warm", "point", "machine")
_HTML = (".html", ".htm")
_MARKDOWN = (".md", ".markdown")


def report(
    model: str | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    store: str | None = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Put all that is known of a machine and a model on one page: the plan, what was measured, what to run.

    Loads and measures nothing. Every figure says whether it was measured (where, with which build, when) or predicted;
    what is not known yet names the command that would tell. The page needs no network and no script.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors, a catalogue name or the name of a pulled model; default: the pulled model
        that was measured last, else smollm2 where it was pulled, else the machine alone.
    output:
        The file to write: .html for a page, .md for Markdown; default: Markdown on stdout.
    store:
        The folder of batches; default: batches in the state folder.
    """
    if output is not None:
        _check(output)
    config = common.load_config()
    found = collect(
        _asked(model or _usual(config), options, common),
        config.state_path,
        batches=store_address(store, common.load_config()),
    )
    if output is not None:
        with new_file(output, force=True) as file:
            file.write(_written(found, output).encode("utf-8", errors="backslashreplace"))
        say(f"wrote {output}")
    if common.json:
        show_json(found)
    elif output is None:
        show_text(markdown(found))


def _check(output: Path) -> None:
    """A report may be written over; nothing else may."""
    if output.suffix.lower() not in (*_HTML, *_MARKDOWN):
        raise UsageError(f"{output} is neither a page nor Markdown", hint="name it report.html or report.md")
    if not output.is_file() or not output.stat().st_size:
        return
    with output.open("rb") as file:
        start = file.read(4096)
    if GENERATOR.encode() not in start and MARK.encode() not in start:
        raise UsageError(f"{output} exists and is no report", hint="name another file, or remove this one first")


def _written(found: ReportPage, output: Path) -> str:
    return page(found) if output.suffix.lower() in _HTML else markdown(found)


def _asked(model: str | None, options: EngineFlags, common: Common) -> Subject:
    config = common.load_config()
    said = options.machine or config.machine
    elsewhere = said in names()
    if model is None:
        return Subject(find(said), elsewhere=elsewhere)
    place = locate(model, common.load_config())
    here = Path(place).exists()
    kind = options.engine_config(config).kind
    machine = find(said)
    profile = read(place)
    plan = None
    if kind in ENGINES:
        goal = options.goal_for(ENGINES[kind])
        plan = plan_engine(model, options, common.load_config()).plan if here else make(machine, profile, goal)
    return Subject(
        plan.machine if plan else machine,
        model,
        identity_of(place) if here else None,
        profile,
        plan,
        elsewhere=elsewhere,
        commands=tuple(_commands(model, place, plan, options)),
    )


def _usual(config: Config) -> str | None:
    """The pulled model that was measured last, else the default one; None: neither is here."""
    here: dict[str, str] = {}
    for each in pulled(config.models_path):
        with suppress(ModelError):  # a damaged one is nobody's wish here
            here |= {identity_of(each.path): each.name} if each.complete else {}
    state = config.state_path
    seen = sorted(
        [(load.when, load.model_id) for load in load_history.read(state)]
        + [(speed.when, speed.model_id) for speed in history.read(state)],
        reverse=True,
    )
    last = next((here[model_id] for _, model_id in seen if model_id in here), None)
    return last or next((name for name in here.values() if name == DEFAULT_MODEL), None)


def _commands(model: str, place: str, plan: Plan | None, options: EngineFlags) -> Iterator[CommandText]:
    name = shlex.quote(model)
    said = shlex.join(_said(options))
    machine = f" --machine {shlex.quote(options.machine)}" if options.machine else ""
    dialect = ENGINES.get(options.engine or "", "llama.cpp")
    engine = "" if dialect == "llama.cpp" else f" --engine {dialect}"
    own = f" --engine {shlex.quote(options.engine)}" if options.engine else ""
    tail = f" {said}" if said else ""
    yield CommandText("Plan it", f"tokenmill plan {name}{machine}{engine}{tail} --explain")
    yield CommandText("Run a batch", f"tokenmill run jobs.jsonl --output results.jsonl --model {name}{own}{tail}")
    yield CommandText("Serve it", f"tokenmill serve {name}{own}{tail}")
    if plan is not None and plan.fits:
        try:
            command = spell(plan, model=place)
        except (NotSpellable, FlagUnknown) as error:
            yield CommandText("The plan's command", f"# {error.message}")
            return
        program, *flags = grouped(list(command.argv))
        lines = [f"{key}={shlex.quote(value)} " for key, value in command.env.items()]
        text = "".join(lines) + joined([shlex.join(program), *map(words, flags)])
        yield CommandText("The plan, spelled for its engine", text, command.notes)


def _said(options: EngineFlags) -> list[str]:
    """What was said of the plan, to be said again."""
    flags: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in _NOT_SAID or value == field.default:
            continue
        flag = field.name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags
