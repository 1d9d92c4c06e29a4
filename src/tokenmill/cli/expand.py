"""`tokenmill expand`: generates new dataset rows from examples."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from tokenmill.cli.options import BodyOptions, EngineFlags
from tokenmill.cli.output import Common, facts, show, show_json, show_text
from tokenmill.cli.recipe_run import RecipeOptions, RecipeResult, run_recipe_command, spent_document, summary_rows
from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.forecast import prospect_of
from tokenmill.recipes.expansion.lines import ExpandPrompts, SamplingOptions
from tokenmill.recipes.expansion.near_duplicates import Near
from tokenmill.recipes.expansion.prompts import JUDGE, known_ways, load, write_prompts
from tokenmill.recipes.expansion.recipe import expand as grow
from tokenmill.recipes.expansion.request import LEAST_YIELD, Expanded, ExpandRequest, summary_document
from tokenmill.recipes.expansion.rows import check_targets
from tokenmill.recipes.expansion.schema import read_schema
from tokenmill.recipes.expansion.seeds import read_seeds
from tokenmill.recipes.expansion.transforms import INSTRUCTION, variants
from tokenmill.recipes.runner import BatchRunner
from tokenmill.units import number_of

_COUNTS = ("made", "kept", "near_duplicates", "invalid", "judged_too_low", "failed")
_TITLES = ("", "made", "kept", "near-dup", "invalid", "too low", "failed")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class GrowOptions:
    """What to generate from the seeds."""

    ways: str | None = None
    """Comma-separated transformations: paraphrase, harder, broader, language, format, instruction (write one for an
    answer), or the name of a custom file in --prompts. Default: paraphrase,harder,broader, plus language and format
    if --languages and --formats are given."""

    languages: str | None = None
    """Comma-separated target languages of the transformation "language": codes or names."""

    formats: str | None = None
    """Comma-separated target formats of the transformation "format": json,table,email,list,steps or any words."""

    per_seed: int | None = None
    """New examples per seed and round, cycling through the transformations; default: one for each."""

    target: int | None = None
    """Number of rows to reach, in as many rounds as necessary. Default: one round."""

    rounds: int | None = None
    """Maximum rounds; default: one, unlimited with --target."""

    least_yield: float = LEAST_YIELD
    """Stop after a round in which a smaller share of the lines than this was new; small rounds are combined.
    Default: 0.02."""

    evolve: bool = False
    """Let later rounds start from the rows of the round before instead of the seeds."""

    prompts: Path | None = None
    """A folder with custom prompt files; missing ones default to the packaged prompts."""

    schema: Path | None = None
    """A JSON schema for every answer (or for the text, if seeds have one column)."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SeedOptions:
    """How to read the seeds."""

    column: str | None = None
    """The column of the instruction, the messages or the text; default: detected from common names."""

    answer_column: str | None = None
    """The column of the answers, in addition to --column."""

    carry: str | None = None
    """Comma-separated columns that new rows copy from their seed."""

    keep_seeds: bool = False
    """Include the seeds in the output, before the new rows."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Which rows to keep."""

    near: float = 0.8
    """Drop rows whose similarity to a seed or an earlier row is at least this, 0 to 1; default: 0.8."""

    judge: Annotated[bool, Parameter(negative="--no-judge")] = True
    """Let the same model score every row from 1 to 5 in a second pass; default: yes."""

    least_score: int = 3
    """Minimum score to keep; default: 3."""

    rejected: Path | None = None
    """Write dropped rows with the reason to this file."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class DrawOptions:
    """Sampling of answers."""

    max_tokens: int = 512
    """Maximum tokens of a new example; truncated ones are dropped. Default: 512."""

    temperature: float = 0.8
    """Sampling temperature; default: 0.8."""

    top_p: float = 0.95
    """Nucleus sampling: sample from the most likely tokens with this total probability; default: 0.95."""

    seed: int = 0
    """Sampling seed; default: 0."""

    def drawing(self) -> SamplingOptions:
        """The recipe's settings; UsageError if an option is invalid."""
        BodyOptions(self.max_tokens, self.temperature, self.top_p, self.seed).defaults()
        return SamplingOptions(self.temperature, self.top_p, self.max_tokens, self.seed)


def expand(
    seeds: Path | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    model: str | None = None,
    write_prompts: Path | None = None,
    growing: GrowOptions = GrowOptions(),
    reading: SeedOptions = SeedOptions(),
    keeping: FilterOptions = FilterOptions(),
    drawing: DrawOptions = DrawOptions(),
    limits: RecipeOptions = RecipeOptions(),  # noqa: B008  frozen
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Grow a dataset from examples: paraphrased, harder, broader, translated, reformatted, or questions for answers.

    New rows have the seeds' columns plus provenance columns. Invalid rows, near duplicates and rows that the model
    scores too low are dropped. After Ctrl-C, a crash or a limit, the same command resumes: no answer is computed twice,
    and the output is the same as without the interruption. Running again with a larger --target continues from the
    existing rows.

    Parameters
    ----------
    seeds:
        The examples: JSONL (also compressed), CSV, TSV or Parquet with instruction, input and output; prompt, response;
        messages; or one column of text.
    output:
        The output file, replaced atomically at the end: .parquet, .jsonl, .jsonl.gz or .jsonl.zst.
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a downloaded model; default: smollm2. With a server
        URL: the name of one of its models.
    write_prompts:
        Write the packaged prompt files to this folder, to edit for --prompts, and exit.
    """
    if write_prompts is not None:
        return _prompts_written(write_prompts, common)
    if seeds is None or output is None:
        raise UsageError(
            "a seeds file and --output are required", hint="tokenmill expand seeds.jsonl -o expanded.parquet"
        )
    check_targets(output, seeds, keeping.rejected)
    order = _order(seeds, output, growing, reading, keeping, drawing.drawing())

    async def recipe(runner: BatchRunner, tell: Callable[[str], None]) -> Expanded:
        return await grow(runner, order, tell)

    done = run_recipe_command(
        recipe,
        lambda _tokens: prospect_of(order),
        called="expand",
        model=model,
        limits=limits,
        options=options,
        common=common,
    )
    if isinstance(done, int):
        return done
    if common.json:
        show_json({**spent_document(done), **summary_document(done.value)})
    else:
        show(*_summary(done, order))
    return done.code


def _prompts_written(folder: Path, common: Common) -> int:
    paths = write_prompts(folder)
    if common.json:
        show_json({"prompts": [str(path) for path in paths]})
    else:
        show_text("\n".join(str(path) for path in paths))
    return 0


def _order(
    seeds: Path,
    output: Path,
    growing: GrowOptions,
    reading: SeedOptions,
    keeping: FilterOptions,
    drawing: SamplingOptions,
) -> ExpandRequest:
    """The validated options and seeds."""
    Near(keeping.near)  # UsageError for an invalid value or if datasketch is not installed
    asked = variants(
        _listed(growing.ways), _listed(growing.languages), _listed(growing.formats), known_ways(growing.prompts)
    )
    prompts = {way: load(way, growing.prompts) for way in dict.fromkeys(variant.way for variant in asked)}
    schema = None if growing.schema is None else read_schema(growing.schema)
    found = read_seeds(seeds, column=reading.column, answer_column=reading.answer_column, carry=_listed(reading.carry))
    if INSTRUCTION in prompts:
        found = replace(found, shape=found.shape.with_task())
    return ExpandRequest(
        found,
        ExpandPrompts(found.shape, prompts, drawing, schema),
        asked,
        output,
        judge=load(JUDGE, growing.prompts) if keeping.judge else None,
        least_score=keeping.least_score,
        near=keeping.near,
        per_seed=growing.per_seed,
        target=growing.target,
        rounds=growing.rounds,
        least_yield=growing.least_yield,
        evolve=growing.evolve,
        keep_seeds=reading.keep_seeds,
        rejected=keeping.rejected,
    )


def _listed(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _summary(done: RecipeResult[Expanded], order: ExpandRequest) -> list[Any]:
    value = done.value
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in _TITLES:
        table.add_column(title, justify="right" if title else "left")
    counted = summary_document(value)
    for name, tally in counted["ways"].items():
        table.add_row(name, *(f"{tally[key]:,}" for key in _COUNTS))
    if len(value.ways) > 1:
        table.add_row("all", *(f"{counted[key]:,}" for key in _COUNTS), style="bold")
    rows = {"rows": _rows_words(value, order), "ended": value.why}
    if value.cut:
        most = order.prompts.drawing.max_tokens
        rows["cut"] = f"{number_of(value.cut, 'answer')} at --max-tokens {most:,}; increase it to keep them"
    if value.waiting:
        rows["waiting"] = f"{number_of(value.waiting, 'line')} without an answer or a score"
    for message, count in list(value.failures.items())[:1]:
        rows["failed"] = f"{count:,}: {message}"
    return [table, "", facts(rows | summary_rows(done))]


def _rows_words(value: Expanded, order: ExpandRequest) -> str:
    if not value.replaced:
        so_far = value.kept + (len(order.seeds.parents) if order.keep_seeds else 0)
        return f"kept the previous {number_of(value.rows, 'row')} in {value.output}; this run has {so_far:,} so far"
    words = f"{value.rows:,} in {value.output}"
    if order.keep_seeds:
        words += f", {value.rows - value.kept:,} of them seeds"
    if value.surplus:
        words += f"; {value.surplus:,} more beyond the target"
    return words
