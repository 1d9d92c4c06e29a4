"""What summaries will take, before anything has run: the lines of the first stage, and what reducing adds."""

from collections.abc import Sequence

from tokenmill.recipes.manifest import read_manifest
from tokenmill.recipes.mill import Prospect, StageProspect
from tokenmill.recipes.pieces import BYTES_PER_TOKEN, TokenCount, groups
from tokenmill.recipes.summarize import Order, judge, stage_name, works_of
from tokenmill.recipes.summarize_work import MOST_LEVELS, NUMBER_TOKENS, Rooms, line_of
from tokenmill.units import number_of

MOST_SAMPLED = 2000  # lines of a stage that are looked at
_ASSUMED = "notes on pieces as long as --max-tokens allows"


def prospect(order: Order, model_id: str, context: int | None, tokens: TokenCount | None) -> Prospect:
    """The stages to come; reads the manifest and the summaries that are there."""
    manifest = read_manifest(order.out)
    judged = judge(order, manifest, model_id)
    unchanged, edited = len(judged.of("unchanged")), len(judged.of("edited"))
    notes = [f"{number_of(unchanged, 'document')} unchanged"] if unchanged else []
    if edited:
        notes.append(f"{number_of(edited, 'summary', 'summaries')} edited by hand and kept")
    if order.found.skipped:
        notes.append(f"{number_of(len(order.found.skipped), 'file or row', 'files or rows')} skipped")
    if not judged.of("to do"):
        return Prospect((), 0, tuple(notes))
    room = order.rooms(context, tokens)
    works = works_of(order, judged, manifest, room)
    split = [len(work.parts) for work in works if len(work.parts) > 1]
    if split:
        notes.append(f"{number_of(len(split), 'document')} longer than the context: {sum(split):,} pieces")
    if room.estimated:
        notes.append("tokens are estimated: 4 bytes each, and a quarter of the context kept free")
    lines = [(name, part) for work in works for name, part in work.pending()]
    step = -(-len(lines) // MOST_SAMPLED)
    first = StageProspect(
        stage_name(1), len(lines),
        tuple(line_of(name, part, order.prompts, order.sampling) for name, part in lines[::step]),
        output_tokens=room.answer,
    )  # fmt: skip
    return Prospect((first, *_reducing(split, room, order)), len(works), tuple(notes))


def _reducing(split: Sequence[int], room: Rooms, order: Order) -> list[StageProspect]:
    """A stage for each level, as if every answer were as long as it may be."""
    head = len(order.prompts.system("reduce").encode())
    note = room.answer + NUMBER_TOKENS
    stages, left = list[StageProspect](), list(split)
    while left and len(stages) < MOST_LEVELS:
        grouped = [groups([note] * count, room.room("reduce")) for count in left]
        asked = [size for sizes in grouped for size in sizes if size > 1]
        name, size_bytes = stage_name(len(stages) + 2), sum(asked) * note * BYTES_PER_TOKEN + len(asked) * head
        stage = StageProspect(
            name, len(asked), prompt_bytes=size_bytes, shared_bytes=head, output_tokens=room.answer, assumed=_ASSUMED
        )
        stages.append(stage)
        left = [len(sizes) for sizes in grouped if len(sizes) > 1]
    return stages
