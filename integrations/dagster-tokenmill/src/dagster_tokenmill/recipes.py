"""Assets for the recipes `expand`, `distill` and `summarize`, run on a gateway.

Options have the names and meanings of the commands' options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_tokenmill.assets import AssetOutput, provenance, recipe_asset
from dagster_tokenmill.paths import folder_for
from dagster_tokenmill.runner import GatewayRunner
from dagster_tokenmill.source import Source, file_of, reader_of
from tokenmill.recipes import (
    INSTRUCTION,
    JUDGE,
    DistillOptions,
    DistillPrompts,
    DocumentOptions,
    ExpandPrompts,
    ExpandRequest,
    SamplingOptions,
    SummarizeRequest,
    Thinking,
    check_prompts,
    distill,
    expand,
    expand_methods,
    expand_summary,
    gather_documents,
    load_prompt,
    read_manifest,
    read_schema,
    read_seeds,
    summarize,
    summary_prompts,
    variants,
    write_rows,
)

SUMMARY_COLUMNS: Mapping[str, str] = {"document": "string", "source": "string", "summary": "string", "file": "string"}


def expand_asset(
    name: str,
    *,
    path: str,
    seeds: Source,
    ways: Sequence[str] = (),
    languages: Sequence[str] = (),
    formats: Sequence[str] = (),
    target: int | None = None,
    rounds: int | None = None,
    per_seed: int | None = None,
    judge: bool = True,
    least_score: int = 3,
    near: float = 0.8,
    keep_seeds: bool = False,
    evolve: bool = False,
    column: str | None = None,
    answer_column: str | None = None,
    carry: Sequence[str] = (),
    prompts: Path | None = None,
    schema: Path | None = None,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008  frozen
    **options: Any,
) -> dg.AssetsDefinition:
    """A dataset grown from the examples of `seeds`; `options`: those of `recipe_asset`."""
    chosen = variants(ways, languages, formats, expand_methods(prompts))
    texts = {way: load_prompt(way, prompts) for way in dict.fromkeys(variant.way for variant in chosen)}
    judge_prompt = load_prompt(JUDGE, prompts) if judge else None
    answer_schema = None if schema is None else read_schema(schema)
    options["ins"], read = reader_of(seeds, "seeds", options.get("ins"))

    async def work(
        context: dg.AssetExecutionContext, runner: GatewayRunner, file: Path, values: Mapping[str, Any]
    ) -> AssetOutput:
        given = file_of(read(context, values), runner.folder, "seeds")
        found = read_seeds(given, column=column, answer_column=answer_column, carry=carry)
        if INSTRUCTION in texts:
            found = replace(found, shape=found.shape.with_task())
        request = ExpandRequest(
            found,
            ExpandPrompts(found.shape, texts, sampling, answer_schema),
            chosen,
            file,
            judge=judge_prompt,
            least_score=least_score,
            near=near,
            per_seed=per_seed,
            target=target,
            rounds=rounds,
            evolve=evolve,
            keep_seeds=keep_seeds,
        )
        done = await expand(runner, request, context.log.info)
        summary = expand_summary(done)
        counts = ("made", "kept", "near_duplicates", "invalid", "judged_too_low", "waiting", "rounds", "why")
        return AssetOutput(done.rows, done.end, {name.replace("_", " "): summary[name] for name in counts})

    return recipe_asset(name, work, path=path, **options)


def distill_asset(
    name: str,
    *,
    path: str,
    prompts: Source,
    ask: DistillOptions = DistillOptions(),  # noqa: B008  frozen
    system: str | None = None,
    column: str | None = None,
    thinking: Thinking = "auto",
    **options: Any,
) -> dg.AssetsDefinition:
    """A teacher's answers to `prompts`, with tokens and log probabilities; `ask`: sampling options."""
    options["ins"], read = reader_of(prompts, "prompts", options.get("ins"))

    async def work(
        context: dg.AssetExecutionContext, runner: GatewayRunner, file: Path, values: Mapping[str, Any]
    ) -> AssetOutput:
        source = DistillPrompts(file_of(read(context, values), runner.folder, "prompts"), column, system)
        check_prompts(source, ask)
        done = await distill(runner, source, ask, file, thinking=thinking, tell=context.log.info)
        metadata = {
            "asked": done.asked,
            "failed": done.failed,
            "waiting": done.waiting,
            "cut": done.cut,
            "reasoned": done.reasoned,
        }
        return AssetOutput(done.rows, done.end, metadata)

    return recipe_asset(name, work, path=path, **options)


def summarize_asset(
    name: str,
    *,
    path: str,
    folder: str,
    docs: Source,
    max_tokens: int = 512,
    language: str | None = None,
    digest: Path | None = None,
    prompts: Path | None = None,
    glob: Sequence[str] = (),
    text_column: str | None = None,
    id_column: str | None = None,
    overlap: int = 0,
    temperature: float = 0.0,
    seed: int | None = None,
    force: bool = False,
    prune: bool = False,
    **options: Any,
) -> dg.AssetsDefinition:
    """A summary of every document; later runs summarize only documents that changed.

    `docs`: a file, a folder or rows. `folder` holds the summaries and their manifest; the table of all summaries is
    written to `path`. Without {partition} in `folder`, a document that occurs in two partitions is summarized once.
    """
    texts = summary_prompts(prompts, digest, max_tokens=max_tokens, language=language)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, **({} if seed is None else {"seed": seed})}
    options["ins"], read = reader_of(docs, "docs", options.get("ins"))

    async def work(
        context: dg.AssetExecutionContext, runner: GatewayRunner, file: Path, values: Mapping[str, Any]
    ) -> AssetOutput:
        out = folder_for(folder, asset=name, partition=context.partition_key if context.has_partition_key else None)
        reading = DocumentOptions(tuple(glob), text_column, id_column, leave_out=out)
        found = gather_documents([file_of(read(context, values), runner.folder, "docs")], reading)
        request = SummarizeRequest(found, out, texts, sampling, overlap=overlap, force=force, prune=prune)
        done = await summarize(runner, request, tokens=None, tell=context.log.info)
        rows = _summaries(out, {document.name for document in found.documents})
        count = write_rows(file, rows, SUMMARY_COLUMNS, metadata=provenance(runner))
        metadata: dict[str, Any] = {
            "documents": done.documents,
            "done": done.done,
            "unchanged": done.unchanged,
            "left": done.left,
            "edited": len(done.edited),
            "failed": len(done.failed),
            "skipped": len(done.skipped),
            "cut": len(done.cut),
            "folder": dg.MetadataValue.path(str(out)),
        }
        return AssetOutput(count, done.end, metadata)

    return recipe_asset(name, work, path=path, **options)


def _summaries(folder: Path, documents: set[str]) -> list[dict[str, Any]]:
    entries = read_manifest(folder).entries
    return [
        {
            "document": name,
            "source": entry.source,
            "summary": (folder / entry.summary).read_text(encoding="utf-8"),
            "file": entry.summary,
        }
        for name, entry in sorted(entries.items())
        if name in documents and entry.state == "done" and (folder / entry.summary).is_file()
    ]
