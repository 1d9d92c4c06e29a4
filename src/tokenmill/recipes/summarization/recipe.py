"""Summarizes documents incrementally: unchanged ones are skipped, interrupted runs resume.

Independent requests form one stage, requests that depend on its answers the next. Finished summaries are written
after each stage, manifest first (see there). Opens no engine and prints nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.engine.reasoning import split_reasoning
from tokenmill.errors import UsageError
from tokenmill.recipes.runner import AnswerOrigin, BatchRunner, RecipeEnd, text_of
from tokenmill.recipes.summarization.chunking import TokenCount
from tokenmill.recipes.summarization.documents import FoundDocuments, Skipped
from tokenmill.recipes.summarization.manifest import (
    DocumentChange,
    Manifest,
    ManifestEntry,
    ManifestState,
    SummaryInputs,
    change_of,
    file_names,
    locked,
    put,
    read_manifest,
    remove,
    sha256_of,
    sha256_of_file,
)
from tokenmill.recipes.summarization.prompts import Prompts
from tokenmill.recipes.summarization.work import (
    DocumentFailure,
    DocumentWork,
    TokenLimits,
    line_of,
    start_work,
    token_limits,
)


@dataclass(frozen=True, slots=True)
class SummarizeRequest:
    """What to summarize, how, and where to write it."""

    found: FoundDocuments
    out: Path
    prompts: Prompts
    sampling: Mapping[str, Any]  # keys of the request body, including max_tokens
    overlap: int = 0
    context: int | None = None  # for engines that do not report theirs
    force: bool = False  # overwrite files written or edited by others
    prune: bool = False  # remove summaries of deleted documents

    def recipe(self, model_id: str) -> SummaryInputs:
        """The inputs of summaries besides their documents."""
        return SummaryInputs(
            self.prompts.digest_sha256, self.prompts.sha256, model_id, dict(self.sampling), self.overlap
        )

    def token_limits(self, context: int | None, tokens: TokenCount | None) -> TokenLimits:
        """Token limits of prompts; raises UsageError if the context is unknown or too short."""
        known = context if context is not None else self.context
        if known is None:
            raise UsageError("the engine does not report its context length", hint="set it with --context")
        return token_limits(known, self.prompts, tokens, answer=self.sampling["max_tokens"], overlap=self.overlap)


@dataclass(frozen=True, slots=True)
class DocumentChanges:
    """What to do with each document."""

    by_document: Mapping[str, DocumentChange]
    files: Mapping[str, str]
    vanished: tuple[str, ...]  # documents of the manifest that no longer exist

    def of(self, change: DocumentChange) -> list[str]:
        """The names of the documents with this change."""
        return [name for name, each in self.by_document.items() if each == change]


@dataclass(frozen=True, slots=True)
class Summarized:
    """Result of a run; every document is in exactly one of done, unchanged, edited, failed and left."""

    end: RecipeEnd
    documents: int
    done: int = 0
    unchanged: int = 0
    edited: tuple[str, ...] = ()  # summaries changed by a person, kept
    failed: tuple[tuple[str, DocumentFailure], ...] = ()
    left: int = 0  # left for the next run
    skipped: tuple[Skipped, ...] = ()
    vanished: tuple[str, ...] = ()
    pruned: int = 0
    pieces: int = 0  # pieces of the finished documents
    reduced: int = 0  # split documents
    cut: tuple[str, ...] = ()  # summaries cut at --max-tokens


def find_changes(request: SummarizeRequest, manifest: Manifest, model_id: str) -> DocumentChanges:
    """Decide what to do with each document; reads summaries, writes nothing."""
    known = {name: entry.summary for name, entry in manifest.entries.items()}
    files = file_names(request.found.documents, known)
    recipe = request.recipe(model_id)
    by_document = {
        document.name: change_of(document, files[document.name], manifest, recipe, force=request.force)
        for document in request.found.documents
    }
    # Unreadable documents are not deleted ones; neither are rows of unreadable tables.
    unread = {skipped.name for skipped in request.found.skipped}
    gone = (name for name in manifest.entries if name not in by_document and unread.isdisjoint(_with_folders(name)))
    return DocumentChanges(by_document, files, tuple(gone))


def _with_folders(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:size]) for size in range(len(parts) + 1)]  # "": the input folder itself


def nothing_to_do(request: SummarizeRequest, manifest: Manifest, model_id: str) -> Summarized | None:
    """The result if no document has changed; None: a runner is needed."""
    changes = find_changes(request, manifest, model_id)
    if changes.of("to do") or (request.prune and changes.vanished):
        return None
    return _summarized(request, changes, "finished", [], manifest, 0)


async def summarize(
    runner: BatchRunner,
    request: SummarizeRequest,
    *,
    tokens: TokenCount | None,
    tell: Callable[[str], None] = lambda _: None,
) -> Summarized:
    """Summarize new or changed documents; `tokens` counts with the model's tokenizer, None: 4 bytes per token."""
    with locked(request.out):
        manifest = read_manifest(request.out)
        changes = find_changes(request, manifest, runner.origin.model_id)
        works = list[DocumentWork]()
        end: RecipeEnd = "finished"
        if changes.of("to do"):
            limits = request.token_limits(runner.origin.context, tokens)
            works = start_all(request, changes, manifest, limits)
            end = await _stages(
                runner, works, limits, request, lambda over: _write(manifest, over, request, runner.origin)
            )
        pruned = _prune(manifest, changes.vanished, tell) if request.prune else 0
        manifest.save()
        return _summarized(request, changes, end, works, manifest, pruned)


def stage_name(number: int) -> str:
    """Display name of a stage, counted from 1."""
    return "read" if number == 1 else f"reduce {number - 1}"


def start_all(
    request: SummarizeRequest, changes: DocumentChanges, manifest: Manifest, limits: TokenLimits
) -> list[DocumentWork]:
    """Start the work on every document that needs a summary."""
    failures = {name: entry.failures for name, entry in manifest.entries.items()}
    wanted = (each for each in request.found.documents if changes.by_document[each.name] == "to do")
    return [start_work(each, changes.files[each.name], failures.get(each.name, 0), limits) for each in wanted]


async def _stages(
    runner: BatchRunner,
    works: Sequence[DocumentWork],
    limits: TokenLimits,
    request: SummarizeRequest,
    write: Callable[[list[DocumentWork]], None],
) -> RecipeEnd:
    """Run stages until every document is finished or a stage ends early; write finished documents after each stage."""
    number = 0
    opened = False
    waiting = list(works)
    end: RecipeEnd = "finished"
    while waiting and end == "finished":
        number += 1
        parts = {custom_id: (work, part) for work in waiting for custom_id, part in work.pending()}
        lines = (line_of(custom_id, part, request.prompts, request.sampling) for custom_id, (_, part) in parts.items())
        ran = await runner.run(stage_name(number), lines)
        opened = opened or any(split_reasoning(text_of(each) or "").by_template for each in ran.answers())
        for answered in ran.answers():
            if answered.custom_id in parts and answered.code != "cancelled":  # cancelled lines are resumed
                work, part = parts[answered.custom_id]
                work.take(part, answered, limits, opened=opened)
        for work in waiting:
            work.advance(limits)
        write([work for work in waiting if work.over])
        end = ran.end
        waiting = [work for work in waiting if not work.over]
    return end


def _write(manifest: Manifest, works: Sequence[DocumentWork], request: SummarizeRequest, origin: AnswerOrigin) -> None:
    """Write finished documents: the manifest, then the summaries. Edited files are kept, with the state `edited`."""
    inputs = request.recipe(origin.model_id)
    files = list[tuple[Path, bytes]]()
    for work in works:
        name = work.document.name
        old = manifest.entries.get(name)
        entry = _entry(work, inputs, origin)
        if work.failure is not None or work.summary is None:
            manifest.entries[name] = _failed(entry, work.failure or DocumentFailure("failed", "no answer"), old)
            continue
        path = manifest.folder / work.file
        data = work.summary.encode() + b"\n"
        new = sha256_of(data)
        here = sha256_of_file(path)
        ours = here is None or here == new or (old is not None and here in old.ours)
        state: ManifestState = "done" if ours or request.force else "edited"
        manifest.entries[name] = replace(
            entry, state=state, summary_sha256=new, before_sha256=here if state == "done" else None
        )
        if state == "done" and here != new:
            files.append((path, data))
    manifest.save()
    for path, data in files:
        put(path, data)


def _entry(work: DocumentWork, inputs: SummaryInputs, origin: AnswerOrigin) -> ManifestEntry:
    return ManifestEntry(
        work.document.name,
        work.document.source,
        work.document.sha256,
        inputs.digest_sha256,
        inputs.prompts_sha256,
        inputs.model_id,
        inputs.sampling,
        inputs.overlap,
        "done",
        work.file,
        model=origin.model,
        engine=origin.engine,
        build=origin.build,
        pieces=work.pieces,
        levels=work.level,
        prompt_tokens=work.prompt_tokens,
        cached_tokens=work.cached_tokens,
        completion_tokens=work.completion_tokens,
        finish_reason=work.finish_reason,
    )


def _failed(entry: ManifestEntry, failure: DocumentFailure, old: ManifestEntry | None) -> ManifestEntry:
    """The entry of a document that failed; keeps the hashes of an existing summary."""
    return replace(
        entry,
        state="failed",
        code=failure.code,
        message=failure.message,
        failures=1 + (old.failures if old else 0),
        summary_sha256=old.summary_sha256 if old else None,
        before_sha256=old.before_sha256 if old else None,
    )


def prunable(manifest: Manifest, name: str) -> bool:
    """Whether a document's summary is unchanged or missing."""
    entry = manifest.entries[name]
    here = sha256_of_file(manifest.folder / entry.summary)
    return here is None or here in entry.ours


def _prune(manifest: Manifest, vanished: Sequence[str], tell: Callable[[str], None]) -> int:
    """Remove unchanged summaries of deleted documents; return the number."""
    pruned = 0
    for name in vanished:
        path = manifest.folder / manifest.entries[name].summary
        if not prunable(manifest, name):
            tell(f"{path} was edited and is kept, although its document no longer exists")
            continue
        remove(path, manifest.folder)
        del manifest.entries[name]
        pruned += 1
    return pruned


def _summarized(
    request: SummarizeRequest,
    changes: DocumentChanges,
    end: RecipeEnd,
    works: Sequence[DocumentWork],
    manifest: Manifest,
    pruned: int,
) -> Summarized:
    over = [work for work in works if work.over]
    done = [work for work in over if manifest.entries[work.document.name].state == "done"]
    kept = [work.document.name for work in over if manifest.entries[work.document.name].state == "edited"]
    return Summarized(
        end=end,
        documents=len(changes.by_document),
        done=len(done),
        unchanged=len(changes.of("unchanged")),
        edited=(*changes.of("edited"), *kept),
        failed=tuple((work.document.name, work.failure) for work in over if work.failure is not None),
        left=len(works) - len(over),
        skipped=request.found.skipped,
        vanished=changes.vanished,
        pruned=pruned,
        pieces=sum(work.pieces for work in done),
        reduced=sum(work.pieces > 1 for work in done),
        cut=tuple(work.document.name for work in done if work.finish_reason == "length"),
    )
