"""`tokenmill expand`: a dataset grown from examples."""

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
    """What is made of the seeds."""

    ways: str | None = None
    """What becomes of an example, with commas between: paraphrase, harder, broader, language, format, instruction (one
    for an answer), or the name of a file of one's own in --prompts. Default: paraphrase,harder,broader, and language
    and format where they are asked for."""

    languages: str | None = None
    """Languages for the way language, with commas between: de,fr or any words that name one."""

    formats: str | None = None
    """Forms for the way format, with commas between: json,table,email,list,steps or any words."""

    per_seed: int | None = None
    """New examples of each seed in a round, its ways in turn; default: one in each way."""

    target: int | None = None
    """Rows to come to: rounds follow each other, drawn anew, until so many have passed. Default: one round."""

    rounds: int | None = None
    """Rounds at most; default: one, with --target as many as it takes."""

    least_yield: float = LEAST_YIELD
    """A round that brings less new than this share of its lines is the last, small ones taken together; default:
    0.02."""

    evolve: bool = False
    """Later rounds begin with the rows that the round before brought, instead of the seeds."""

    prompts: Path | None = None
    """A folder of prompt files of one's own; what is not in it is taken as packaged."""

    schema: Path | None = None
    """A JSON schema that every answer follows (the text itself where seeds have one column)."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SeedOptions:
    """How the seeds are read, and what becomes of them."""

    column: str | None = None
    """The column of the instruction, the messages or the text; default: told by the usual names."""

    answer_column: str | None = None
    """The column of the answers, beside --column."""

    carry: str | None = None
    """Columns that new rows take over from their seed, with commas between."""

    keep_seeds: bool = False
    """Put the seeds into the output, before the new rows."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class FilterOptions:
    """What is kept."""

    near: float = 0.8
    """Drop what is at least so similar to a seed or an earlier row, from 0 to 1; default: 0.8."""

    judge: Annotated[bool, Parameter(negative="--no-judge")] = True
    """Let the same model give every row a score from 1 to 5 in a second pass; default: yes."""

    least_score: int = 3
    """The lowest score that is kept; default: 3."""

    rejected: Path | None = None
    """A file for rows that were dropped, with the reason."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class DrawOptions:
    """How answers are drawn."""

    max_tokens: int = 512
    """Tokens of a new example at most; one that is cut there is dropped. Default: 512."""

    temperature: float = 0.8
    """How freely is drawn; default: 0.8."""

    top_p: float = 0.95
    """Draw from the likeliest tokens that together have this probability; default: 0.95."""

    seed: int = 0
    """Another one gives other rows; default: 0."""

    def drawing(self) -> SamplingOptions:
        """As the recipe takes it; UsageError where a value is wrong."""
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
    """Grow a dataset from examples: other words, harder, broader, another language or format, a question for an answer.

    New rows have the seeds' columns, and columns that say where each comes from. What is invalid, nearly the same as
    another row, or judged too low by the model itself is dropped. After Ctrl-C, a crash or a limit the same command
    goes on: no answer is computed twice, and the output is the same as without the interruption. A larger --target
    later on begins with the rows that are there.

    Parameters
    ----------
    seeds:
        The examples: JSONL (also packed), CSV, TSV or Parquet, with instruction, input and output; prompt and response;
        messages; or one column of text.
    output:
        The file for the rows, replaced whole at the end: .parquet, .jsonl, .jsonl.gz or .jsonl.zst.
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model; default: smollm2. With the URL of a
        server that has several: which of them.
    write_prompts:
        Put the packaged prompt files into this folder, to be edited for --prompts, and do nothing else.
    """
    if write_prompts is not None:
        return _prompts_written(write_prompts, common)
    if seeds is None or output is None:
        raise UsageError(
            "expand needs a file of seeds and one for the rows", hint="tokenmill expand seeds.jsonl -o expanded.parquet"
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
    """All that was said, read and checked."""
    Near(keeping.near)  # refuses what cannot be, also that datasketch is not there
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
        rows["cut"] = f"{number_of(value.cut, 'answer')} at --max-tokens {most:,}: a larger one would let them end"
    if value.waiting:
        rows["waiting"] = f"{number_of(value.waiting, 'line')} without an answer or a score"
    for message, count in list(value.failures.items())[:1]:
        rows["failed"] = f"{count:,}: {message}"
    return [table, "", facts(rows | summary_rows(done))]


def _rows_words(value: Expanded, order: ExpandRequest) -> str:
    if not value.replaced:
        so_far = value.kept + (len(order.seeds.parents) if order.keep_seeds else 0)
        return f"kept the {number_of(value.rows, 'row')} of before in {value.output}; this run has {so_far:,} so far"
    words = f"{value.rows:,} in {value.output}"
    if order.keep_seeds:
        words += f", {value.rows - value.kept:,} of them seeds"
    if value.surplus:
        words += f"; {value.surplus:,} more {'was' if value.surplus == 1 else 'were'} good, beyond the target"
    return words
