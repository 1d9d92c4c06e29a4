"""`tokenmill distill`: a teacher's answers to a file of prompts, as a table to train on."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.cli.export import exported, parse_target, rows_about
from tokenmill.cli.options import BodyOptions, EngineFlags
from tokenmill.cli.output import Common, facts, say, show, show_json
from tokenmill.cli.recipe_run import (
    RecipeOptions,
    RecipeResult,
    Tokens,
    run_recipe_command,
    spent_document,
    summary_rows,
)
from tokenmill.engine.engine import MOST_LOGPROBS
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.recipes.distillation import recipe
from tokenmill.recipes.distillation.prompts import REFUSED, DistillOptions, DistillPrompts, checked_lines
from tokenmill.recipes.distillation.recipe import Distilled
from tokenmill.recipes.distillation.rows import Thinking, is_distilled
from tokenmill.recipes.export import ExportFormat, ExportRequest
from tokenmill.recipes.runner import BatchRunner, Prospect
from tokenmill.storage.rows import check_target
from tokenmill.units import number_of

TOP_LOGPROBS = 5
MAX_TOKENS = 2048
_MOST_SAMPLES = 1000
_OPTIONS = frozenset(("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop"))


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Drawing:
    """How answers are drawn; a line's own values come first."""

    samples: int = 1
    """Answers to each prompt, drawn with seeds of their own; default: 1."""

    temperature: float | None = None
    """0 always takes the likeliest token. Default: 0 for one sample, 0.7 for several."""

    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability; default: the engine's."""

    seed: int = 0
    """Goes into the seed of every draw; another one gives other answers. Default: 0."""

    max_tokens: int = MAX_TOKENS
    """Tokens of an answer at most, reasoning included; default: 2048."""

    stop: tuple[str, ...] = ()
    """A text that ends an answer and is left out of it; may be given several times."""

    body: str | None = None
    """More for every line as a JSON object with keys of OpenAI's bodies, such as '{"min_p": 0.1}'."""

    top_logprobs: int = TOP_LOGPROBS
    """How many of the likeliest tokens are kept at each place, with their probabilities: 0 to 20; 0 keeps the chosen
    token alone. Default: 5."""

    no_logprobs: bool = False
    """Keep no tokens and no probabilities, just texts."""

    def ask(self) -> DistillOptions:
        """What is asked of every prompt; UsageError where that cannot be."""
        if not 1 <= self.samples <= _MOST_SAMPLES:
            raise UsageError(f"--samples must be from 1 to {_MOST_SAMPLES}, not {self.samples}")
        if not 0 <= self.top_logprobs <= MOST_LOGPROBS:
            raise UsageError(f"--top-logprobs must be from 0 to {MOST_LOGPROBS}, not {self.top_logprobs}")
        if self.samples > 1 and self.temperature == 0:
            raise UsageError(
                "at temperature 0 all samples of a prompt are the same", hint="--temperature above 0, or --samples 1"
            )
        BodyOptions(self.max_tokens, self.temperature, self.top_p, self.seed).defaults()
        more = BodyOptions(body=self.body).defaults()
        for key in more:
            if key in _OPTIONS or key in REFUSED:
                raise UsageError(
                    f"--body has {key!r}: {REFUSED.get(key, 'there is an option for it')}",
                    hint="leave it out of --body",
                )
        tops = None if self.no_logprobs else self.top_logprobs
        return DistillOptions(
            self.samples, self.temperature, self.top_p, self.seed, self.max_tokens, tops, self.stop, more
        )


def distill(
    prompts: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    model: str | None = None,
    system: Path | None = None,
    column: str | None = None,
    thinking: Thinking = "auto",
    export: tuple[str, ...] = (),
    check: bool = False,
    force: bool = False,
    drawing: Drawing = Drawing(),
    limits: RecipeOptions = RecipeOptions(),  # noqa: B008  frozen
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Have a teacher answer a file of prompts, and write a table to train on: texts, tokens and their probabilities.

    Each row has the prompt's messages, the answer, the reasoning apart from it where the model marks it, why it ended,
    the numbers of its tokens in the model's own vocabulary, their probabilities and the likeliest others, and where it
    comes from. The file appears whole or not at all. After Ctrl-C, a crash or a used-up limit the same command goes on,
    and no answer is computed twice. `tokenmill export` writes what trainers read; --export does so at once.

    Parameters
    ----------
    prompts:
        JSONL (also packed), CSV, TSV or Parquet with messages or a prompt in each row, or OpenAI's batch lines.
    output:
        The table to write: .parquet, or .jsonl, .jsonl.gz, .jsonl.zst.
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model; default: smollm2.
    system:
        The file of a system message for prompts that have none.
    column:
        The column that holds the user's message; default: prompt, text, question or instruction, the first there is.
    thinking:
        How reasoning is found: auto by the marks that models write; opened says that the template opens the thinking,
        so that an answer that was cut off without a mark is all thought; off leaves the text as it is. Default: auto.
    export:
        FORMAT=FILE: write that as well when all is answered, such as messages=train.jsonl; may be given several times.
    check:
        Load what --export wrote with the `datasets` library, and hold every row against the table.
    force:
        Replace the files that --export names, whatever they hold; default: only exports in the same format.
    """
    ask = drawing.ask()
    check_target(output)
    _check_replaceable(output)
    targets = _targets(export, output, check=check, force=force)
    source = DistillPrompts(prompts, column, None if system is None else _text(system))
    if not limits.dry_run:
        checked_lines(source, ask)  # before anything is loaded; a forecast does it itself
        say(_asked(ask))
    done = run_recipe_command(
        partial(_run, prompts=source, ask=ask, output=output, thinking=thinking),
        partial(_prospect, source, ask),
        called=f"distill {prompts.name}",
        model=model,
        limits=limits,
        options=options,
        common=common,
    )
    if isinstance(done, int):
        return done
    made, wrong = _exported(done, targets, output, check=check, force=force)
    _tell(done, made, common)
    if wrong is not None:
        raise wrong
    return done.code


def _targets(export: tuple[str, ...], output: Path, *, check: bool, force: bool) -> list[tuple[ExportFormat, Path]]:
    """What to export; UsageError where files would take each other's place."""
    if check and not export:
        raise UsageError(
            "--check reads back what --export writes, and there is no --export",
            hint="--export messages=train.jsonl --check, or leave --check out",
        )
    targets = [parse_target(text, force=force) for text in export]
    names = [path.resolve() for path in (output, *(path for _, path in targets))]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"{twice} is named twice: one file would take the other's place",
            hint="give --output and each --export a file of its own",
        )
    return targets


def _exported(
    done: RecipeResult[Distilled], targets: list[tuple[ExportFormat, Path]], output: Path, *, check: bool, force: bool
) -> tuple[list[dict[str, Any]], TokenmillError | None]:
    """What was exported, and what went wrong first: the table is there all the same, and is told of."""
    made = list[dict[str, Any]]()
    wrong = None
    if targets and done.end != "finished":
        say("exports are written when every prompt is answered; tokenmill export does it with what is there")
        return made, wrong
    for kind, path in targets:
        try:
            made.append(exported(output, path, ExportRequest(kind), checked=check, force=force))
        except TokenmillError as error:
            wrong = wrong or error
    return made, wrong


async def _run(
    runner: BatchRunner,
    tell: Callable[[str], None],
    *,
    prompts: DistillPrompts,
    ask: DistillOptions,
    output: Path,
    thinking: Thinking,
) -> Distilled:
    return await recipe.distill(runner, prompts, ask, output, thinking=thinking, tell=tell)


def _prospect(prompts: DistillPrompts, ask: DistillOptions, _tokens: Tokens) -> Prospect:
    return recipe.prospect_of(prompts, ask)


def _asked(ask: DistillOptions) -> str:
    if ask.samples == 1:
        how = "the likeliest one" if ask.drawn_at == 0 else f"drawn at temperature {ask.drawn_at:g}"
        return f"one answer to each prompt, {how}, of {ask.max_tokens:,} tokens at most"
    why = "" if ask.temperature is not None else ", as no --temperature was given"
    return f"{ask.samples} answers to each prompt, drawn at temperature {ask.drawn_at:g}{why}"


def _check_replaceable(output: Path) -> None:
    if output.is_file() and output.stat().st_size and not is_distilled(output):
        raise UsageError(
            f"{output} holds something else: distill did not write it",
            hint="name another output, or move that file away",
        )


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", hint="write it as UTF-8") from error
    if not text:
        raise UsageError(f"{path} is empty", hint="leave --system out, or write the message into it")
    return text


def _tell(done: RecipeResult[Distilled], made: list[dict[str, Any]], common: Common) -> None:
    found = done.value
    for failure in found.told:
        say(f"no answer to {failure}")
    if common.json:
        show_json(spent_document(done) | asdict(found) | {"exports": made})
        return
    show(facts(_rows(found) | summary_rows(done)))
    for export in made:
        show("", facts(rows_about(export)))


def _rows(found: Distilled) -> dict[str, str]:
    rows = {"table": f"{number_of(found.rows, 'row')} of {found.asked:,} in {found.output}"}
    if found.waiting:
        rows["waiting"] = f"{number_of(found.waiting, 'answer')}; the same command goes on"
    if found.failures:
        rows["no answer"] = ", ".join(f"{count:,} {code}" for code, count in found.failures.items())
    if found.cut:
        rows["cut off"] = f"{number_of(found.cut, 'answer')} ended at --max-tokens; exports leave them out"
    if found.reasoned:
        rows["reasoning"] = f"kept apart in {number_of(found.reasoned, 'row')}"
    if found.without_ids:
        rows["token ids"] = f"null in {number_of(found.without_ids, 'row')}: the engine does not tell them"
    return rows
