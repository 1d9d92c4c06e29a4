"""Stages of a summarization for a forecast: the lines of the first stage, and the reduction."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenmill.engine.reasoning import split_reasoning
from tokenmill.recipes.history import MAX_LINES
from tokenmill.recipes.runner import Answered, Line, Prospect, StageProspect, text_of
from tokenmill.recipes.summarization.chunking import BYTES_PER_TOKEN, TokenCount, groups
from tokenmill.recipes.summarization.manifest import Manifest, read_manifest
from tokenmill.recipes.summarization.recipe import SummarizeRequest, find_changes, prunable, stage_name, start_all
from tokenmill.recipes.summarization.work import MAX_LEVELS, NUMBER_TOKENS, DocumentWork, TokenLimits, line_of
from tokenmill.units import number_of

Stored = Callable[[Line], Answered | None]
"""The stored answer to a line; None: it must be computed."""
_MAX_NAMES = 5
_ASSUMED = "notes on pieces have the maximum length, --max-tokens"


def prospect(
    request: SummarizeRequest,
    model_id: str,
    context: int | None,
    tokens: TokenCount | None,
    stored: Stored = lambda _line: None,
) -> Prospect:
    """The stages to run; reads the manifest and existing summaries."""
    manifest = read_manifest(request.out)
    changes = find_changes(request, manifest, model_id)
    unchanged = len(changes.of("unchanged"))
    edited = len(changes.of("edited"))
    notes = [f"{number_of(unchanged, 'document')} unchanged"] if unchanged else []
    if edited:
        notes.append(f"{number_of(edited, 'summary', 'summaries')} edited by hand and kept")
    if request.found.skipped:
        notes.append(f"{number_of(len(request.found.skipped), 'file or row', 'files or rows')} skipped")
    if request.prune and changes.vanished:
        notes += _pruning(manifest, changes.vanished)
    if not changes.of("to do"):
        return Prospect((), 0, tuple(notes))
    limits = request.token_limits(context, tokens)
    works = start_all(request, changes, manifest, limits)
    split = [work for work in works if len(work.parts) > 1]
    if split:
        pieces = sum(len(work.parts) for work in split)
        notes.append(f"{number_of(len(split), 'document')} longer than the context, split into {pieces:,} pieces")
    unread = [len(work.parts) for work in split if not _answered(work, request, limits, stored)]
    if limits.estimated:
        notes.append("tokens are estimated at 4 bytes each, and a quarter of the context is kept free")
    lines = [(name, part) for work in works for name, part in work.pending()]
    step = -(-len(lines) // MAX_LINES)
    first = StageProspect(
        stage_name(1),
        len(lines),
        tuple(line_of(name, part, request.prompts, request.sampling) for name, part in lines[::step]),
        output_tokens=limits.answer,
    )
    return Prospect((first, *_reducing(unread, limits, request)), len(works), tuple(notes))


def _pruning(manifest: Manifest, vanished: Sequence[str]) -> list[str]:
    """Notes on the effect of --prune."""
    gone = [name for name in vanished if prunable(manifest, name)]
    notes = list[str]()
    more = f", and {len(gone) - _MAX_NAMES:,} more" if len(gone) > _MAX_NAMES else ""
    if gone:
        count = number_of(len(gone), "summary", "summaries")
        notes.append(f"--prune will remove {count} of deleted documents: {', '.join(gone[:_MAX_NAMES])}{more}")
    if edited := len(vanished) - len(gone):
        notes.append(
            f"{number_of(edited, 'summary', 'summaries')} of deleted documents were edited by hand and are kept"
        )
    return notes


def _answered(work: DocumentWork, request: SummarizeRequest, limits: TokenLimits, stored: Stored) -> bool:
    """Whether stored answers complete a document at every level. Changes nothing."""
    tried = replace(work, parts=[replace(part) for part in work.parts])
    opened = False
    while not tried.over:
        pending = list(tried.pending())
        found = [stored(line_of(name, part, request.prompts, request.sampling)) for name, part in pending]
        answers = [each for each in found if each is not None]
        if len(answers) < len(pending):
            return False
        opened = opened or any(split_reasoning(text_of(each) or "").by_template for each in answers)
        for (_, part), answered in zip(pending, answers, strict=True):
            tried.take(part, answered, limits, opened=opened)
        tried.advance(limits)
    return True


def _reducing(split: Sequence[int], limits: TokenLimits, request: SummarizeRequest) -> list[StageProspect]:
    """One stage per level of reduction, assuming answers of maximum length."""
    prefix_bytes = len(request.prompts.system("reduce").encode())
    note = limits.answer + NUMBER_TOKENS
    stages = list[StageProspect]()
    left = list(split)
    while left and len(stages) < MAX_LEVELS:
        grouped = [groups([note] * count, limits.available("reduce")) for count in left]
        reduced = [size for sizes in grouped for size in sizes if size > 1]
        name = stage_name(len(stages) + 2)
        size_bytes = sum(reduced) * note * BYTES_PER_TOKEN + len(reduced) * prefix_bytes
        stage = StageProspect(
            name,
            len(reduced),
            prompt_bytes=size_bytes,
            shared_bytes=prefix_bytes,
            output_tokens=limits.answer,
            assumed=_ASSUMED,
        )
        stages.append(stage)
        left = [len(sizes) for sizes in grouped if len(sizes) > 1]
    return stages
