"""`tokenmill distill`: writes a teacher model's answers to a file of prompts as a training table."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.api.planning.plan import EnginePlan
from tokenmill.cli.options import SAMPLING, BodyOptions, EngineFlags, Model, TokenCount
from tokenmill.cli.output import Common, facts, say, show, show_json
from tokenmill.cli.recipes.export import exported, parse_target, rows_about
from tokenmill.cli.recipes.run import (
    RecipeOptions,
    RecipeResult,
    Tokens,
    run_recipe_command,
    spent_document,
    summary_rows,
)
from tokenmill.engine.engine import MAX_LOGPROBS
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.recipes.distillation import recipe
from tokenmill.recipes.distillation.prompts import REFUSED, DistillOptions, DistillPrompts, check_prompts
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


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, slots=True)
class DistillSampling:
    """Sampling of answers; values in a line take precedence."""

    samples: int = 1
    """Answers per prompt, each with its own seed."""

    temperature: float | None = None
    """Sampling temperature; 0 is greedy. [default: 0 for one sample, 0.7 for several]"""

    top_p: float | None = None
    """Nucleus sampling: total probability of the candidates. [default: the engine's]"""

    seed: int = 0
    """Base seed; a different one gives different answers."""

    max_tokens: Annotated[TokenCount, Parameter(alias="-n")] = MAX_TOKENS
    """Maximum tokens per answer, including reasoning."""

    stop: tuple[str, ...] = ()
    """Stop string, which ends an answer and is removed from it; may be repeated."""

    body: str | None = None
    """Other request fields for every line, as a JSON object such as '{"min_p": 0.1}'."""

    top_logprobs: int = TOP_LOGPROBS
    """Number of most likely tokens stored per position with their log probabilities, 0 to 20; 0 stores the chosen
    token only."""

    no_logprobs: bool = False
    """Store texts only, without token ids and log probabilities."""

    def ask(self) -> DistillOptions:
        """The settings for every prompt; UsageError if an option is invalid."""
        if not 1 <= self.samples <= _MOST_SAMPLES:
            raise UsageError(f"--samples must be 1-{_MOST_SAMPLES} (got {self.samples})")
        if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise UsageError(f"--top-logprobs must be 0-{MAX_LOGPROBS} (got {self.top_logprobs})")
        if self.samples > 1 and self.temperature == 0:
            raise UsageError(
                "at temperature 0 all samples of a prompt are equal", hint="use --temperature above 0, or --samples 1"
            )
        BodyOptions(self.max_tokens, self.temperature, self.top_p, self.seed).defaults()
        more = BodyOptions(body=self.body).defaults()
        for key in more:
            if key in _OPTIONS or key in REFUSED:
                raise UsageError(
                    f"--body has {key!r}: {REFUSED.get(key, 'use the option for it')}",
                    hint="remove it from --body",
                )
        tops = None if self.no_logprobs else self.top_logprobs
        return DistillOptions(
            self.samples, self.temperature, self.top_p, self.seed, self.max_tokens, tops, self.stop, more
        )


def distill(
    prompts: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="FILE")],
    model: Model = None,
    system: Path | None = None,
    column: str | None = None,
    thinking: Thinking = "auto",
    export: Annotated[tuple[str, ...], Parameter(metavar="FORMAT=FILE")] = (),
    check: bool = False,
    force: bool = False,
    sampling: DistillSampling = DistillSampling(),
    limits: RecipeOptions = RecipeOptions(),  # noqa: B008  frozen
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Generate training data: a teacher model's answers to a file of prompts, with tokens and log probabilities.

    Each row has the messages, the answer, separate reasoning if the model marks it, the finish reason, the token ids,
    the log probabilities of the chosen and the most likely tokens, and the provenance. The file is written atomically.
    After Ctrl-C, a crash or a limit, the same command resumes; no answer is computed twice. `tokenmill export` converts
    the table to trainers' formats; --export does that in the same run.

        tokenmill distill prompts.jsonl -o out.parquet --model kimi.gguf --samples 4

    Parameters
    ----------
    prompts:
        JSONL (also compressed), CSV, TSV or Parquet with messages or a prompt in each row, or OpenAI batch lines.
    output:
        Write the table to FILE: .parquet, .jsonl, .jsonl.gz or .jsonl.zst.
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model. [default: smollm2]
    system:
        File with the system message for prompts that have none.
    column:
        Column with the user's message. [default: the first of prompt, text, question and instruction]
    thinking:
        How to detect reasoning: auto uses the tags that models write; opened means that the chat template opens the
        thinking block, so that a truncated answer without a tag is all reasoning; off keeps the text as it is.
    export:
        Also export the finished table, such as messages=train.jsonl; may be repeated.
    check:
        Load the exported files with the `datasets` library and compare every row with the table.
    force:
        Let --export overwrite any file, instead of only exports in the same format.
    """
    ask = sampling.ask()
    check_target(output)
    _check_replaceable(output)
    targets = _targets(export, output, check=check, force=force)
    source = DistillPrompts(prompts, column, None if system is None else _text(system))
    if not limits.dry_run:
        check_prompts(source, ask)  # before loading the model; a forecast checks it too
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
    _print_result(done, made, common)
    if wrong is not None:
        raise wrong
    return done.code


def _targets(export: tuple[str, ...], output: Path, *, check: bool, force: bool) -> list[tuple[ExportFormat, Path]]:
    """The exports; UsageError if two have the same file."""
    if check and not export:
        raise UsageError(
            "--check requires --export",
            hint="add --export messages=train.jsonl, or omit --check",
        )
    targets = [parse_target(text, force=force) for text in export]
    names = [path.resolve() for path in (output, *(path for _, path in targets))]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"{twice} is given twice",
            hint="use a different file for --output and each --export",
        )
    return targets


def _exported(
    done: RecipeResult[Distilled], targets: list[tuple[ExportFormat, Path]], output: Path, *, check: bool, force: bool
) -> tuple[list[dict[str, Any]], TokenmillError | None]:
    """The exports and the first error, if any: the table is complete and reported either way."""
    made = list[dict[str, Any]]()
    wrong = None
    if targets and done.end != "finished":
        say("no exports yet: some prompts are unanswered; tokenmill export exports the finished rows")
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


def _prospect(prompts: DistillPrompts, ask: DistillOptions, _tokens: Tokens, _planned: EnginePlan | None) -> Prospect:
    return recipe.prospect_of(prompts, ask)


def _asked(ask: DistillOptions) -> str:
    if ask.samples == 1:
        how = "greedy" if ask.effective_temperature == 0 else f"sampled at temperature {ask.effective_temperature:g}"
        return f"one answer per prompt, {how}, up to {ask.max_tokens:,} tokens"
    why = "" if ask.temperature is not None else " (default)"
    return f"{ask.samples} answers per prompt, sampled at temperature {ask.effective_temperature:g}{why}"


def _check_replaceable(output: Path) -> None:
    if output.is_file() and output.stat().st_size and not is_distilled(output):
        raise UsageError(
            f"{output} was not written by tokenmill distill",
            hint="choose another output, or move that file",
        )


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", hint="write it as UTF-8") from error
    if not text:
        raise UsageError(f"{path} is empty", hint="write the message into it, or omit --system")
    return text


def _print_result(done: RecipeResult[Distilled], made: list[dict[str, Any]], common: Common) -> None:
    found = done.value
    for failure in found.messages:
        say(f"failed: {failure}")
    if common.json:
        show_json(spent_document(done) | asdict(found) | {"exports": made})
        return
    show(facts(_rows(found) | summary_rows(done)))
    for export in made:
        show("", facts(rows_about(export)))


def _rows(found: Distilled) -> dict[str, str]:
    rows = {"table": f"{number_of(found.rows, 'row')} of {found.asked:,} in {found.output}"}
    if found.waiting:
        rows["waiting"] = f"{number_of(found.waiting, 'answer')}; run the same command again to continue"
    if found.failures:
        rows["no answer"] = ", ".join(f"{count:,} {code}" for code, count in found.failures.items())
    if found.cut:
        rows["cut off"] = f"{number_of(found.cut, 'answer')} ended at --max-tokens; exports omit them"
    if found.reasoned:
        rows["reasoning"] = f"separate in {number_of(found.reasoned, 'row')}"
    if found.without_ids:
        rows["token ids"] = f"null in {number_of(found.without_ids, 'row')}: the engine does not report them"
    return rows
