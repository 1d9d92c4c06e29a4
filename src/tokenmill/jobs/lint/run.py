"""Finds what breaks the reuse of prompts in a job file, before the jobs run.

`Lint` takes lines one by one. Memory stays flat for a million of them: prefixes are remembered by checksum, a sample of
them by text. A cost is the number of prompt bytes computed unnecessarily, compared with the best order and spelling of
the same jobs. Pure; a tokenizer is passed in as a function.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from hashlib import sha256
from typing import NamedTuple
from zlib import crc32

from tokenmill.errors import RequestRefused
from tokenmill.jobs.ingest.identity import place
from tokenmill.jobs.ingest.line import body_of, custom_id_of
from tokenmill.jobs.lint.costs import (
    HEAD_CHUNK,
    HEAD_ENDS,
    LONE_ENDS,
    TAIL_CHUNK,
    TAIL_ENDS,
    FileOrder,
    PromptTree,
    Repeats,
    ToolsBehind,
)
from tokenmill.jobs.lint.differences import Families, Member, between
from tokenmill.jobs.lint.parts import Prompt, prompt_of, shortened
from tokenmill.jobs.lint.prefixes import MOST_CHARACTERS, Misplaced, SharedHeads, misplaced, with_context
from tokenmill.jobs.lint.report import (
    BYTES_PER_TOKEN,
    COSTLY,
    LONG_DIGEST_TOKENS,
    WORTH_SAYING,
    FindingKind,
    LintFinding,
    Report,
)
from tokenmill.jobs.lint.spellings import (
    AS_IS,
    CHANGING,
    EVERY,
    KEPT,
    SCANNED,
    WITHOUT,
    Changing,
    spell_head,
    spell_tail,
)
from tokenmill.jobs.lint.tokens import TokenCount, Tokens
from tokenmill.jobs.openai.call import Call, checked
from tokenmill.storage.json_text import parse, shown
from tokenmill.storage.lines import BadLine
from tokenmill.units import MIB

RECENT_HEADS = 256
RECENT_BYTES = 32 * MIB
TAIL_FAMILY = 128  # characters that distinguish the beginnings of last messages
LONE_HEAD = 4096  # characters of a single text that count as its prefix
OFTEN_OWN = 0.1  # share of jobs with unique ids from which this is reported, although it costs nothing
_OWN: tuple[Changing, ...] = ("id", "timestamp")
BAD_SHOWN = 3
"""Bad lines that are reported with a reason."""


class _State(NamedTuple):
    mask: int
    checksum: int
    bytes: int


class _Head(NamedTuple):
    """A prefix whose text was seen recently."""

    states: list[_State]  # the first one as it is
    without: int  # checksum without variable text
    differs: frozenset[Changing]  # from the first of its family
    bytes: int


class Lint:
    """Lints a stream of lines: `add` and `bad` take them, `report` can be called at any time."""

    def __init__(self, *, context: int | None = None, count: TokenCount | None = None) -> None:
        self._tree = PromptTree()
        self._heads = SharedHeads()
        self._tokens = Tokens(count, context)
        self._recent: OrderedDict[str, _Head] = OrderedDict()
        self._recent_bytes = 0
        self._room = RECENT_BYTES
        self._spellings: dict[str, _State] = {}
        self._families = Families()
        self._differ: Counter[Changing] = Counter()  # jobs
        self._heads_differ: Counter[Changing] = Counter()  # the same without what is in last messages
        self._first_own: dict[Changing, int] = {}  # the first line whose prefix differs so
        self._noise: Counter[Changing] = Counter()  # bytes that may be lost only because texts are compared in chunks
        self._jobs = self._bad = self._unlimited = 0
        self._bad_shown: list[tuple[int, str]] = []
        self._identities = Repeats()
        self._names = Repeats()
        self._again = ""
        self._order = FileOrder()
        self._tools = ToolsBehind()

    def add(self, number: int, text: str) -> None:
        """One line of the file."""
        try:
            line = parse(text)
            custom_id = custom_id_of(line, number)
            endpoint, body = body_of(line)
            call = Call(endpoint, checked(endpoint, body))
            identity = place("", call).identity
        except RequestRefused as error:
            self.bad(BadLine(number, f"{error.message} ({error.hint})" if error.hint else error.message))
        except UnicodeEncodeError:
            self.bad(BadLine(number, "half of a surrogate pair (\\ud800 to \\udfff) stands alone"))
        except ValueError as error:
            self.bad(BadLine(number, str(error)))
        except RecursionError:
            self.bad(BadLine(number, "nested too deeply"))
        else:
            self._identities.add(identity)
            if self._names.add(sha256(custom_id.encode()).digest()):
                self._again = self._again or f"line {number} has {shown(custom_id)} again"
            self._call(number, call)

    def bad(self, line: BadLine) -> None:
        """A line that cannot be run."""
        self._bad += 1
        if len(self._bad_shown) < BAD_SHOWN:
            self._bad_shown.append((line.number, line.reason))

    def _call(self, number: int, call: Call) -> None:
        self._jobs += 1
        self._unlimited += "max_tokens" not in call.values
        prompt = prompt_of(call)
        to_write = call.values.get("max_tokens")
        if prompt.tokens is not None:
            state = self._tree.walk(prompt.tokens, 0, EVERY, HEAD_ENDS)
            self._tree.count(len(prompt.tokens), EVERY)
            self._tokens.numbers(number, len(prompt.tokens) // 4, to_write)
            self._order.add(str(state), "", (len(prompt.tokens), 0))
            return
        text = "".join(part.text for part in prompt.head)
        head = self._recent.get(text)
        if head is None:
            head = self._new_head(number, prompt, text)
        else:
            self._recent.move_to_end(text)
        tail = "".join(part.text for part in prompt.tail)
        in_tail = self._tail(number, prompt, head, tail)
        self._differ.update(head.differs | in_tail)
        self._heads_differ.update(head.differs)
        sizes = head.bytes, len(tail.encode())
        self._order.add(text, tail, sizes)
        self._tokens.add(number, text, tail, head.without, sizes, to_write)
        if prompt.tools:
            self._tools.add(prompt)

    def _new_head(self, number: int, prompt: Prompt, text: str) -> _Head:
        """Walk a prefix in all its spellings and compare it with its family. Adds to the tree and the families."""
        spelled = spell_head(prompt, text)
        states = list[_State]()
        without = 0
        size = len(text.encode())
        for mask, spelling in spelled.spellings:
            state = self._walked(spelling, mask)
            states.append(state)
            without = state.checksum if mask & WITHOUT else without
        differs: frozenset[Changing] = frozenset()
        if text:
            self._heads.add(without, number, shortened(prompt.head, MOST_CHARACTERS), spelled.without, own=True)
            member = Member(number, prompt.head, spelled.segments, prompt.tools)
            differs = self._families.join(("head", without), member)
            self._noise.update(dict.fromkeys(differs, HEAD_CHUNK))
            self._first_own = dict.fromkeys(differs, number) | self._first_own
        head = _Head(states, without, differs, size)
        self._recent[text] = head
        self._recent_bytes += size
        while len(self._recent) > RECENT_HEADS or (self._recent_bytes > RECENT_BYTES and len(self._recent) > 1):
            _, gone = self._recent.popitem(last=False)
            self._recent_bytes -= gone.bytes
        return head

    def _walked(self, text: str, mask: int) -> _State:
        """Add one spelling of a prefix to the tree; most of them were there before, for another prefix as it is."""
        known = self._spellings.get(text)
        if known is not None and known.mask & mask == mask:
            return known._replace(mask=mask)
        data = text.encode()
        state = _State(mask, self._tree.walk(data, 0, mask, HEAD_ENDS), len(data))
        self._room -= len(data)
        if len(self._spellings) >= RECENT_HEADS or self._room < 0:
            self._spellings.clear()
            self._room = RECENT_BYTES
        self._spellings[text] = state if known is None else state._replace(mask=mask | known.mask)
        return state

    def _tail(self, number: int, prompt: Prompt, head: _Head, text: str) -> frozenset[Changing]:
        """Walk a last message behind its prefix in all spellings of both."""
        spelled = spell_tail(text)
        ends = TAIL_ENDS if prompt.head else LONE_ENDS
        for mask, spelling in spelled.spellings:
            data = spelling.encode()
            for head_mask, state, size in head.states:
                if both := mask & head_mask:
                    self._tree.walk(data, state, both, ends)
                    self._tree.count(size + len(data), both)
        without = spelled.without
        key = head.without
        if not prompt.head:
            start = without[:LONE_HEAD]
            key = crc32(start.encode())
            self._heads.add(key, number, shortened(prompt.tail, LONE_HEAD), start, own=False)
        self._heads.job(key)
        if spelled.segments:
            self._noise.update(dict.fromkeys(spelled.segments[0].marked.kinds(), 2 * TAIL_CHUNK))
        if not spelled.segments or len(without) < TAIL_FAMILY // 2:
            return frozenset()
        member = Member(number, shortened(prompt.tail, SCANNED), spelled.segments)
        return self._families.join((head.without, without[:TAIL_FAMILY]), member)

    def report(self) -> Report:
        """The findings so far."""
        tree = self._tree
        tokens = self._tokens.measured()
        total = tree.total(AS_IS)
        shared = tree.shared(AS_IS)
        # Signs are mostly shorter than the text that they replace: scale to shares of the file's text.
        scale = total / max(1, tree.total(WITHOUT))
        without = round(scale * tree.shared(WITHOUT))
        costs = {kind: self._cost(kind, scale) for kind in CHANGING}
        findings = [
            LintFinding(kind, self._differ[kind] or None, cost, self._families.examples.get(kind))
            for kind, cost in costs.items()
            if cost > self._noise[kind]
        ]
        placed, lost = self._misplaced()
        findings += placed
        findings = [found for found in findings if (found.cost_bytes or 0) >= max(256, WORTH_SAYING * total)]
        findings.sort(key=lambda found: (found.kind not in COSTLY, -(found.cost_bytes or 0)))
        repairable = any(found.kind in COSTLY for found in findings)
        findings += self._own_ends({found.kind for found in findings})
        return Report(
            jobs=self._jobs,
            prompt_bytes=total,
            compute_bytes=total - shared,
            repaired_bytes=max(0, total - max(without, shared) - lost) if repairable else total - shared,
            bytes_per_token=tokens or BYTES_PER_TOKEN,
            counted=tokens is not None,
            findings=(*findings, *self._others(total - shared, tokens or BYTES_PER_TOKEN)),
            bad=tuple(self._bad_shown),
        )

    def _cost(self, kind: Changing, scale: float) -> int:
        """A lower bound of the bytes computed unnecessarily because of one kind."""
        tree = self._tree
        computed = tree.distinct(KEPT[kind]) - tree.distinct(
            WITHOUT
        )  # with the variable text, which does not count as lost
        shared = tree.shared(WITHOUT) - tree.shared(KEPT[kind])  # with signs that are longer than the text they replace
        return round(scale * min(computed, shared))

    def _misplaced(self) -> tuple[list[LintFinding], int]:
        """One finding for each kind of misplacement, and the bytes lost outside of documents."""
        by_kind: dict[FindingKind, list[Misplaced]] = {}
        for found in misplaced(self._heads.all()):
            by_kind.setdefault(found.kind, []).append(found)
        scale = self._heads.scale
        findings = []
        for kind, every in by_kind.items():
            worst = max(every, key=lambda found: found.lost_bytes)
            first = worst.partner
            second = worst.head
            example = between(first.line, first.parts, worst.at, second.line, second.parts, worst.at)
            jobs = scale * sum(found.head.jobs for found in every)
            findings.append(LintFinding(kind, jobs, scale * sum(found.lost_bytes for found in every), example))
        return findings, sum(found.cost_bytes or 0 for found in findings if found.kind in COSTLY)

    def _own_ends(self, told: Collection[FindingKind]) -> Iterable[LintFinding]:
        """Ids and times at the end of most prefixes: nearly free, so not among the findings so far."""
        for kind in _OWN:
            jobs = self._heads_differ[kind]
            if kind not in told and jobs > 1 and jobs >= OFTEN_OWN * self._jobs:
                yield LintFinding("own_end", jobs, detail=f"line {self._first_own[kind]}, for one")
                return

    def _others(self, compute_bytes: int, bytes_per_token: float) -> Iterable[LintFinding]:
        """Findings that cost no prompt bytes, or cost them elsewhere."""
        if self._bad:
            reasons = "; ".join(f"line {number}: {reason}" for number, reason in self._bad_shown)
            yield LintFinding("bad_line", self._bad, detail=reasons, fatal=True)
        if not self._jobs:
            yield LintFinding("empty", None)
            return
        if self._again:
            yield LintFinding("custom_id", self._names.count, detail=self._again, fatal=True)
        if longer := self._tokens.too_long():
            yield LintFinding("too_long", longer.jobs, detail=longer.words, fatal=True)
        if own := with_context(self._heads.all()):
            words = f"line {own[0].line} and line {own[1].line}, for two"
            yield LintFinding("context", self._heads.scale * sum(head.jobs for head in own), detail=words)
        if digest := self._tokens.long_heads(LONG_DIGEST_TOKENS):
            yield LintFinding("long_digest", digest.jobs, detail=digest.words)
        if self._unlimited:
            yield LintFinding("max_tokens", self._unlimited)
        again = self._tools.cost_bytes()
        if again > WORTH_SAYING * compute_bytes:
            yield LintFinding("tools_behind", None, again)
        if copies := self._identities.count:
            yield LintFinding("duplicates", copies)
        alternating = self._order.computed_bytes - compute_bytes
        if alternating > 0.05 * compute_bytes:
            times = f"a slot that works in this order computes {round(alternating / bytes_per_token):,} tokens more"
            yield LintFinding("file_order", None, detail=times)
