"""`tokenmill expand`: generates new dataset rows from examples."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.table import Table

from tokenmill.cli.options import SAMPLING, BodyOptions, EngineFlags, Model, TokenCount
from tokenmill.cli.output import Common, facts, show, show_json, show_text
from tokenmill.cli.recipes.run import RecipeOptions, RecipeResult, run_recipe_command, spent_document, summary_rows
from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.forecast import prospect_of
from tokenmill.recipes.expansion.lines import ExpandPrompts, SamplingOptions
from tokenmill.recipes.expansion.near_duplicates import NearDuplicates
from tokenmill.recipes.expansion.prompts import JUDGE, expand_methods, load_prompt, write_prompts
from tokenmill.recipes.expansion.recipe import expand as grow
from tokenmill.recipes.expansion.request import MIN_YIELD, Expanded, ExpandRequest, expand_summary
from tokenmill.recipes.expansion.rows import check_targets
from tokenmill.recipes.expansion.schema import read_schema
from tokenmill.recipes.expansion.seeds import read_seeds
from tokenmill.recipes.expansion.transforms import INSTRUCTION, variants
from tokenmill.recipes.runner import BatchRunner
from tokenmill.units import number_of

_COUNTS = ("made", "kept", "near_duplicates", "invalid", "judged_too_low", "failed")
_TITLES = ("", "made", "kept", "near-dup", "invalid", "too low", "failed")


@Parameter(name="*", group=Group.create_ordered("Generation", sort_key=0))
@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What to generate from the seeds."""

    ways: Annotated[str | None, Parameter(metavar="LIST")] = None
    """Comma-separated transformations: paraphrase, harder, broader, language, format, instruction (writes one for an
    answer), or the name of a file in --prompts. [default: paraphrase,harder,broader, with language and format if
    --languages and --formats are given]"""

    languages: Annotated[str | None, Parameter(metavar="LIST")] = None
    """Comma-separated target languages of the transformation "language": codes or names."""

    formats: Annotated[str | None, Parameter(metavar="LIST")] = None
    """Comma-separated target formats of the transformation "format": json, table, email, list, steps or any words."""

    per_seed: int | None = None
    """New examples per seed and round, cycling through the transformations. [default: one per transformation]"""

    target: int | None = None
    """Number of rows to reach, in as many rounds as necessary. [default: the rows of one round]"""

    rounds: int | None = None
    """Maximum number of rounds. [default: 1, or unlimited with --target]"""

    least_yield: float = MIN_YIELD
    """Minimum share of new rows in a round; the recipe stops after a round with less. Small rounds are combined."""

    evolve: bool = False
    """Let later rounds start from the rows of the round before instead of the seeds."""

    prompts: Path | None = None
    """Folder with custom prompt files; the packaged prompts replace missing ones."""

    schema: Path | None = None
    """JSON schema of every answer (or of the text, if the seeds have one column)."""


@Parameter(name="*", group=Group.create_ordered("Seeds", sort_key=0))
@dataclass(frozen=True, slots=True)
class SeedOptions:
    """How to read the seeds."""

    column: Annotated[str | None, Parameter(metavar="COLUMN")] = None
    """Column of the instruction, the messages or the text. [default: detected from common names]"""

    answer_column: Annotated[str | None, Parameter(metavar="COLUMN")] = None
    """Column of the answers, in addition to --column."""

    carry: Annotated[str | None, Parameter(metavar="LIST")] = None
    """Comma-separated columns that new rows copy from their seed."""

    keep_seeds: bool = False
    """Include the seeds in the output, before the new rows."""


@Parameter(name="*", group=Group.create_ordered("Filters", sort_key=0))
@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Which rows to keep."""

    near: float = 0.8
    """Drop rows whose similarity to a seed or an earlier row is at least this value, 0 to 1."""

    judge: Annotated[bool, Parameter(negative="--no-judge")] = True
    """Let the same model score every row from 1 to 5 in a second pass."""

    least_score: int = 3
    """Minimum score of a row to be kept."""

    rejected: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write dropped rows with the reason to FILE."""


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, slots=True)
class ExpandSampling:
    """Sampling of answers."""

    max_tokens: Annotated[TokenCount, Parameter(alias="-n")] = 512
    """Maximum tokens of a new example; truncated examples are dropped."""

    temperature: float = 0.8
    """Sampling temperature; 0 is greedy."""

    top_p: float = 0.95
    """Nucleus sampling: total probability of the candidates."""

    seed: int = 0
    """Sampling seed."""

    def settings(self) -> SamplingOptions:
        """The recipe's settings; UsageError if an option is invalid."""
        BodyOptions(self.max_tokens, self.temperature, self.top_p, self.seed).defaults()
        return SamplingOptions(self.temperature, self.top_p, self.max_tokens, self.seed)


def expand(
    seeds: Path | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FILE")] = None,
    model: Model = None,
    write_prompts: Path | None = None,
    generation: GenerationOptions = GenerationOptions(),
    seed_options: SeedOptions = SeedOptions(),
    filters: FilterOptions = FilterOptions(),
    sampling: ExpandSampling = ExpandSampling(),
    limits: RecipeOptions = RecipeOptions(),  # noqa: B008  frozen
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Grow a dataset from examples: paraphrased, harder, broader, translated, reformatted, or questions for answers.

    New rows have the seeds' columns plus provenance columns. Invalid rows, near duplicates and rows that the model
    scores too low are dropped. After Ctrl-C, a crash or a limit, the same command resumes: no answer is computed twice,
    and the output is the same as without the interruption. Running again with a larger --target continues from the
    existing rows.

        tokenmill expand seeds.jsonl -o out.parquet --model kimi.gguf --target 1000

    Parameters
    ----------
    seeds:
        The examples: JSONL (also compressed), CSV, TSV or Parquet with the columns instruction, input and output; or
        prompt and response; or messages; or one column of text.
    output:
        Write the dataset to FILE, replaced atomically at the end: .parquet, .jsonl, .jsonl.gz or .jsonl.zst.
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model; with the URL of a server, one of its models.
        [default: smollm2]
    write_prompts:
        Write the packaged prompt files to this folder, to be edited for --prompts, and exit.
    """
    if write_prompts is not None:
        return _prompts_written(write_prompts, common)
    if seeds is None or output is None:
        raise UsageError(
            "a seeds file and --output are required", hint="tokenmill expand seeds.jsonl -o expanded.parquet"
        )
    check_targets(output, seeds, filters.rejected)
    request = _request(seeds, output, generation, seed_options, filters, sampling.settings())

    async def recipe(runner: BatchRunner, tell: Callable[[str], None]) -> Expanded:
        return await grow(runner, request, tell)

    done = run_recipe_command(
        recipe,
        lambda _tokens, _planned: prospect_of(request),
        called="expand",
        model=model,
        limits=limits,
        options=options,
        common=common,
    )
    if isinstance(done, int):
        return done
    if common.json:
        show_json({**spent_document(done), **expand_summary(done.value)})
    else:
        show(*_summary(done, request))
    return done.code


def _prompts_written(folder: Path, common: Common) -> int:
    paths = write_prompts(folder)
    if common.json:
        show_json({"prompts": [str(path) for path in paths]})
    else:
        show_text("\n".join(str(path) for path in paths))
    return 0


def _request(
    seeds: Path,
    output: Path,
    generation: GenerationOptions,
    seed_options: SeedOptions,
    filters: FilterOptions,
    sampling: SamplingOptions,
) -> ExpandRequest:
    """The validated options and seeds."""
    NearDuplicates(filters.near)  # UsageError for an invalid value or if datasketch is not installed
    asked = variants(
        _listed(generation.ways),
        _listed(generation.languages),
        _listed(generation.formats),
        expand_methods(generation.prompts),
    )
    prompts = {way: load_prompt(way, generation.prompts) for way in dict.fromkeys(variant.way for variant in asked)}
    schema = None if generation.schema is None else read_schema(generation.schema)
    found = read_seeds(
        seeds, column=seed_options.column, answer_column=seed_options.answer_column, carry=_listed(seed_options.carry)
    )
    if INSTRUCTION in prompts:
        found = replace(found, shape=found.shape.with_task())
    return ExpandRequest(
        found,
        ExpandPrompts(found.shape, prompts, sampling, schema),
        asked,
        output,
        judge=load_prompt(JUDGE, generation.prompts) if filters.judge else None,
        least_score=filters.least_score,
        near=filters.near,
        per_seed=generation.per_seed,
        target=generation.target,
        rounds=generation.rounds,
        least_yield=generation.least_yield,
        evolve=generation.evolve,
        keep_seeds=seed_options.keep_seeds,
        rejected=filters.rejected,
    )


def _listed(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _summary(done: RecipeResult[Expanded], request: ExpandRequest) -> list[Any]:
    value = done.value
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in _TITLES:
        table.add_column(title, justify="right" if title else "left")
    counted = expand_summary(value)
    for name, tally in counted["ways"].items():
        table.add_row(name, *(f"{tally[key]:,}" for key in _COUNTS))
    if len(value.ways) > 1:
        table.add_row("all", *(f"{counted[key]:,}" for key in _COUNTS), style="bold")
    rows = {"rows": _rows_words(value, request), "ended": value.why}
    if value.cut:
        most = request.prompts.sampling.max_tokens
        rows["cut"] = f"{number_of(value.cut, 'answer')} at --max-tokens {most:,}; increase it to keep them"
    if value.waiting:
        rows["waiting"] = f"{number_of(value.waiting, 'line')} without an answer or a score"
    for message, count in list(value.failures.items())[:1]:
        rows["failed"] = f"{count:,}: {message}"
    return [table, "", facts(rows | summary_rows(done))]


def _rows_words(value: Expanded, request: ExpandRequest) -> str:
    if not value.replaced:
        so_far = value.kept + (len(request.seeds.parents) if request.keep_seeds else 0)
        return f"kept the previous {number_of(value.rows, 'row')} in {value.output}; this run has {so_far:,} so far"
    words = f"{value.rows:,} in {value.output}"
    if request.keep_seeds:
        words += f", {value.rows - value.kept:,} of them seeds"
    if value.surplus:
        words += f"; {value.surplus:,} more beyond the target"
    return words
