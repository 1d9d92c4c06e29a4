"""`tokenmill summarize`: summarizes documents incrementally; later runs process only new and changed ones."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.api.engines.choose import EngineChoice
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.api.stores import store_address
from tokenmill.api.tokens import token_counter
from tokenmill.cli.options import BodyOptions, EngineFlags, Model, TokenCount
from tokenmill.cli.output import Common, facts, say, show, show_json
from tokenmill.cli.progress import choose, opened
from tokenmill.cli.recipes.run import (
    RecipeOptions,
    RecipeResult,
    Tokens,
    run_recipe_command,
    spent_document,
    summary_rows,
)
from tokenmill.errors import UsageError
from tokenmill.jobs.store.open import has_batches
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.recipes.history import stored_answer
from tokenmill.recipes.runner import BatchRunner, Prospect
from tokenmill.recipes.summarization.documents import DocumentOptions, FoundDocuments, gather_documents
from tokenmill.recipes.summarization.forecast import prospect
from tokenmill.recipes.summarization.manifest import MANIFEST, read_manifest
from tokenmill.recipes.summarization.prompts import summary_prompts, write_packaged
from tokenmill.recipes.summarization.recipe import Summarized, SummarizeRequest, nothing_to_do
from tokenmill.recipes.summarization.recipe import summarize as summarize_documents
from tokenmill.units import number_of

MAX_TOKENS = 512
MAX_NAMES = 5  # shown per category


def summarize(
    *docs: Path,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FOLDER")] = None,
    model: Model = None,
    digest: Path | None = None,
    max_tokens: Annotated[TokenCount, Parameter(alias="-n")] = MAX_TOKENS,
    language: str | None = None,
    prompts: Path | None = None,
    write_prompts: Path | None = None,
    glob: Annotated[tuple[str, ...], Parameter(metavar="PATTERN")] = (),
    text_column: Annotated[str | None, Parameter(metavar="COLUMN")] = None,
    id_column: Annotated[str | None, Parameter(metavar="COLUMN")] = None,
    overlap: TokenCount = 0,
    temperature: float = 0.0,
    seed: int | None = None,
    body: str | None = None,
    strict: bool = False,
    force: bool = False,
    prune: bool = False,
    limits: RecipeOptions = RecipeOptions(),  # noqa: B008  frozen
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Summarize documents into a folder; later runs process only new and changed documents.

    A document that fits the context is summarized in one request; a longer one is split at headings, paragraphs or
    sentences, and the notes on its pieces are reduced to one summary. OUTPUT gets a file PATH.md per document, and
    manifest.jsonl with the origin of every summary. Summaries edited by hand are not overwritten. After Ctrl-C, a crash
    or a limit, the same command resumes. Exit code 0: no document failed.

        tokenmill summarize docs/ -o summaries/ --model kimi.gguf --max-hours 8

    Parameters
    ----------
    docs:
        Files and folders: text, Markdown, reST, HTML, or tables with a text in each row (JSON, JSONL, CSV, TSV,
        Parquet). Hidden files are ignored; other files are skipped and reported.
    output:
        Write the summaries to FOLDER, which is created if necessary.
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model. [default: smollm2]
    digest:
        File with a text for the start of every prompt, such as a glossary, a style guide or a digest made by
        `tokenmill digest`. It is computed once and stays cached.
    max_tokens:
        Maximum tokens per summary.
    language:
        Language of the summaries, such as German. [default: the language of the document]
    prompts:
        Folder with document.md, piece.md or reduce.md, which replace the packaged prompts.
    write_prompts:
        Write the packaged prompt files to this folder, to be edited for --prompts, and exit.
    glob:
        In folders, read only files that match a pattern such as `*.md` or `guide/**/*.txt`; may be repeated.
    text_column:
        Column with the text, for tables. [default: text]
    id_column:
        Column with the name of each row, for tables. [default: rows are numbered]
    overlap:
        Tokens that a piece repeats from the previous one.
    temperature:
        Sampling temperature; 0 is greedy.
    seed:
        Sampling seed. [default: the engine's]
    body:
        Other request fields, as a JSON object such as '{"reasoning_effort": "none"}'.
    strict:
        Exit with an error if a file would be skipped.
    force:
        Overwrite summaries edited by hand; with --write-prompts, overwrite existing prompt files.
    prune:
        Remove the summaries of documents that no longer exist.
    """
    if write_prompts is not None:
        return _write_prompts(write_prompts, common, force=force)
    if output is None or not docs:
        missing = "documents" if output is not None else "--output"
        raise UsageError(f"no {missing} given", hint="for example: tokenmill summarize docs/ -o summaries/")
    if max_tokens < 1 or overlap < 0:
        raise UsageError(f"--max-tokens must be at least 1, and --overlap at least 0 (got {max_tokens} and {overlap})")
    given = BodyOptions(max_tokens=max_tokens, temperature=temperature, seed=seed, body=body)
    texts = summary_prompts(prompts, digest, max_tokens=max_tokens, language=language)
    found = gather_documents(docs, DocumentOptions(glob, text_column, id_column, leave_out=output))
    _check_found(found, output, strict=strict)
    request = SummarizeRequest(
        found, output, texts, given.defaults(), overlap=overlap, context=options.context, force=force, prune=prune
    )
    limits.check()
    choice = choose(model, options, common, dry_run=limits.dry_run)
    if not limits.dry_run and (ended := nothing_to_do(request, read_manifest(output), choice.model_id)) is not None:
        return _finish(ended, output, None, common)
    known = choice.model if model is None and choice.path is not None else model
    with token_counter(str(choice.path) if choice.path is not None else None, common.load_config()) as counting:
        if counting.count is None:
            why = counting.why_not if choice.path is not None else "the vocabulary of a running engine is unknown"
            say(f"tokens are estimated at 4 bytes each, and a quarter of the context is kept free: {why}")
        result = run_recipe_command(
            _recipe(request, counting.count),
            _prospect(request, choice, limits, options.context, common),
            called="summarize",
            model=known,
            limits=limits,
            options=options,
            common=common,
        )
    return result if isinstance(result, int) else _finish(result.value, output, result, common)


def _recipe(
    request: SummarizeRequest, count: Tokens
) -> Callable[[BatchRunner, Callable[[str], None]], Awaitable[Summarized]]:
    return lambda runner, tell: summarize_documents(runner, request, tokens=count, tell=tell)


def _prospect(
    request: SummarizeRequest, choice: EngineChoice, limits: RecipeOptions, given: int | None, common: Common
) -> Callable[[Tokens, EnginePlan | None], Prospect]:
    def made(count: Tokens, planned: EnginePlan | None) -> Prospect:
        if planned is not None:
            context: int | None = planned.plan.settings.context
        else:
            context = given or asyncio.run(_context_of(choice))
        address = store_address(limits.store, common.load_config())
        if not has_batches(address):
            return prospect(request, choice.model_id, context, count)
        with StoreReader(address) as reader:
            return prospect(request, choice.model_id, context, count, partial(stored_answer, reader, choice.model_id))

    return made


async def _context_of(choice: EngineChoice) -> int | None:
    """The context length of a running engine."""
    async with opened(choice, None, choice.state) as engine:
        return engine.identity.context


def _write_prompts(folder: Path, common: Common, *, force: bool) -> int:
    made = write_packaged(folder, force=force)
    if common.json:
        show_json({"prompts": [str(path) for path in made]})
    else:
        show(facts({path.stem: str(path) for path in made}))
        say(f"edit them, then: tokenmill summarize DOCS -o OUT --prompts {folder}")
    return 0


def _check_found(found: FoundDocuments, output: Path, *, strict: bool) -> None:
    """Report skipped files; UsageError if no document is left, or with --strict if any file is skipped."""
    skipped = found.skipped
    words = [f"{each.name}: {each.reason}" for each in skipped]
    if not found.documents and found.contains_output:
        outside = f"no documents outside the output folder {output}, which is not read"
        raise UsageError("\n".join((outside, *words[:MAX_NAMES])), hint="choose an --output folder without documents")
    if not found.documents:
        raise UsageError(
            "\n".join(("no documents found", *words[:MAX_NAMES])),
            hint="text, Markdown, reST, HTML, JSON, JSONL, CSV, TSV and Parquet are read",
        )
    if skipped and strict:
        raise UsageError(
            "\n".join((f"--strict: {number_of(len(skipped), 'file')} cannot be read", *words[:MAX_NAMES])),
            hint="convert or remove them, or omit --strict to skip them",
        )
    for word in words[:MAX_NAMES]:
        say(f"skipped {word}")
    if len(words) > MAX_NAMES:
        say(f"skipped {len(words) - MAX_NAMES:,} more; --json lists all")


def _finish(ended: Summarized, output: Path, run: RecipeResult[Summarized] | None, common: Common) -> int:
    if common.json:
        show_json(_document(ended, output, run))
    else:
        _show(ended, output, run)
    if ended.failed:
        say("run the same command again to retry the failed documents")
    if run is not None and run.code:
        return run.code
    return 1 if ended.failed else 0


def _show(ended: Summarized, output: Path, run: RecipeResult[Summarized] | None) -> None:
    rows = {
        "documents": _documents(ended),
        "remaining": f"{ended.left:,} for the next run" if ended.left else "",
        "failed": _names([f"{name} ({failure.message})" for name, failure in ended.failed]),
        "kept": f"{_names(list(ended.edited))}; edited by hand, --force overwrites" if ended.edited else "",
        "cut": f"{_names(list(ended.cut))}; truncated at --max-tokens" if ended.cut else "",
        "skipped": f"{len(ended.skipped):,}" if ended.skipped else "",
        "gone": _gone(ended),
        "summaries": f"{output}, {output / MANIFEST}",
    }
    more = summary_rows(run) if run is not None else {"answers": "none: nothing has changed"}
    show(facts({label: value for label, value in (rows | more).items() if value}))


def _documents(ended: Summarized) -> str:
    pieces = f", {ended.reduced:,} of them in pieces" if ended.reduced else ""
    parts = [f"{ended.done:,} done{pieces}"] if ended.done else []
    if ended.unchanged:
        parts.append(f"{ended.unchanged:,} unchanged")
    return f"{ended.documents:,}: {', '.join(parts)}" if parts else f"{ended.documents:,}"


def _gone(ended: Summarized) -> str:
    if not ended.vanished:
        return ""
    if ended.pruned:
        return f"removed {number_of(ended.pruned, 'summary', 'summaries')} of deleted documents"
    return f"{_names(list(ended.vanished))}; --prune removes their summaries"


def _names(names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return f"{len(names):,}: {', '.join(names[:MAX_NAMES])}{more}"


def _document(ended: Summarized, output: Path, run: RecipeResult[Summarized] | None) -> dict[str, Any]:
    spent = spent_document(run) if run is not None else {"end": "finished", "answers": 0, "reused": 0}
    return spent | {
        "documents": ended.documents,
        "done": ended.done,
        "unchanged": ended.unchanged,
        "skipped": len(ended.skipped),
        "failed": len(ended.failed),
        "edited": len(ended.edited),
        "left": ended.left,
        "vanished": len(ended.vanished),
        "pruned": ended.pruned,
        "pieces": ended.pieces,
        "tokens": run.spent.tokens if run is not None else 0,
        "output": str(output),
        "files": {
            "skipped": [{"document": each.name, "reason": each.reason} for each in ended.skipped],
            "failed": [{"document": name, "code": why.code, "message": why.message} for name, why in ended.failed],
            "edited": list(ended.edited),
            "vanished": list(ended.vanished),
            "cut": list(ended.cut),
        },
    }
