"""Stages of a summarization for a forecast: the lines of the first stage, and the reduction."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenmill.recipes.history import MOST_LINES
from tokenmill.recipes.reasoning import part as parted
from tokenmill.recipes.runner import Answered, Line, Prospect, StageProspect, text_of
from tokenmill.recipes.summarization.chunking import BYTES_PER_TOKEN, TokenCount, groups
from tokenmill.recipes.summarization.manifest import Manifest, read_manifest
from tokenmill.recipes.summarization.recipe import SummarizeRequest, judge, prunable, stage_name, works_of
from tokenmill.recipes.summarization.work import MOST_LEVELS, NUMBER_TOKENS, DocumentWork, Rooms, line_of
from tokenmill.units import number_of

Stored = Callable[[Line], Answered | None]
"""The stored answer to a line; None: it must be computed."""
_SHOWN = 5  # names
_ASSUMED = "notes on pieces as long as --max-tokens allows"


def prospect(
    request: SummarizeRequest,
    model_id: str,
    context: int | None,
    tokens: TokenCount | None,
    stored: Stored = lambda _line: None,
) -> Prospect:
    """The stages to run; reads the manifest and existing summaries."""
    manifest = read_manifest(request.out)
    judged = judge(request, manifest, model_id)
    unchanged = len(judged.of("unchanged"))
    edited = len(judged.of("edited"))
    notes = [f"{number_of(unchanged, 'document')} unchanged"] if unchanged else []
    if edited:
        notes.append(f"{number_of(edited, 'summary', 'summaries')} edited by hand and kept")
    if request.found.skipped:
        notes.append(f"{number_of(len(request.found.skipped), 'file or row', 'files or rows')} skipped")
    if request.prune and judged.vanished:
        notes += _pruning(manifest, judged.vanished)
    if not judged.of("to do"):
        return Prospect((), 0, tuple(notes))
    room = request.rooms(context, tokens)
    works = works_of(request, judged, manifest, room)
    split = [work for work in works if len(work.parts) > 1]
    if split:
        pieces = sum(len(work.parts) for work in split)
        notes.append(f"{number_of(len(split), 'document')} longer than the context: {pieces:,} pieces")
    unread = [len(work.parts) for work in split if not _answered(work, request, room, stored)]
    if room.estimated:
        notes.append("tokens are estimated: 4 bytes each, and a quarter of the context kept free")
    lines = [(name, part) for work in works for name, part in work.pending()]
    step = -(-len(lines) // MOST_LINES)
    first = StageProspect(
        stage_name(1),
        len(lines),
        tuple(line_of(name, part, request.prompts, request.sampling) for name, part in lines[::step]),
        output_tokens=room.answer,
    )
    return Prospect((first, *_reducing(unread, room, request)), len(works), tuple(notes))


def _pruning(manifest: Manifest, vanished: Sequence[str]) -> list[str]:
    """Notes on the effect of --prune."""
    gone = [name for name in vanished if prunable(manifest, name)]
    notes = list[str]()
    more = f", and {len(gone) - _SHOWN:,} more" if len(gone) > _SHOWN else ""
    if gone:
        count = number_of(len(gone), "summary", "summaries")
        notes.append(f"--prune will remove {count} of documents that are gone: {', '.join(gone[:_SHOWN])}{more}")
    if edited := len(vanished) - len(gone):
        notes.append(f"{number_of(edited, 'summary', 'summaries')} of documents that are gone edited by hand and kept")
    return notes


def _answered(work: DocumentWork, request: SummarizeRequest, room: Rooms, stored: Stored) -> bool:
    """Whether stored answers complete a document at every level. Changes nothing."""
    tried = replace(work, parts=[replace(part) for part in work.parts])
    opened = False
    while not tried.over:
        pending = list(tried.pending())
        found = [stored(line_of(name, part, request.prompts, request.sampling)) for name, part in pending]
        answers = [each for each in found if each is not None]
        if len(answers) < len(pending):
            return False
        opened = opened or any(parted(text_of(each) or "").by_template for each in answers)
        for (_, part), answered in zip(pending, answers, strict=True):
            tried.take(part, answered, room, opened=opened)
        tried.advance(room)
    return True


def _reducing(split: Sequence[int], room: Rooms, request: SummarizeRequest) -> list[StageProspect]:
    """One stage per level of reduction, assuming answers of maximum length."""
    head = len(request.prompts.system("reduce").encode())
    note = room.answer + NUMBER_TOKENS
    stages = list[StageProspect]()
    left = list(split)
    while left and len(stages) < MOST_LEVELS:
        grouped = [groups([note] * count, room.room("reduce")) for count in left]
        asked = [size for sizes in grouped for size in sizes if size > 1]
        name = stage_name(len(stages) + 2)
        size_bytes = sum(asked) * note * BYTES_PER_TOKEN + len(asked) * head
        stage = StageProspect(
            name, len(asked), prompt_bytes=size_bytes, shared_bytes=head, output_tokens=room.answer, assumed=_ASSUMED
        )
        stages.append(stage)
        left = [len(sizes) for sizes in grouped if len(sizes) > 1]
    return stages
