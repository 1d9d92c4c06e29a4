"""Finds what prevents prompt reuse in a job file, before the jobs run.

`Lint` takes lines one by one, in constant memory: prefixes are stored as checksums, and a sample of them as text. The
cost of a finding is the number of prompt bytes computed unnecessarily, compared with the best order and spelling of the
same jobs. Pure; a tokenizer is passed in as a function.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from hashlib import sha256
from typing import NamedTuple
from zlib import crc32

from tokenmill.errors import RequestRefused
from tokenmill.jobs.ingest.identity import place
from tokenmill.jobs.ingest.line import body_of, custom_id_of
from tokenmill.jobs.lint.answer_room import AnswerRoom
from tokenmill.jobs.lint.costs import (
    LONE_ENDS,
    PREFIX_CHUNK,
    PREFIX_ENDS,
    TAIL_CHUNK,
    TAIL_ENDS,
    FileOrder,
    PromptTree,
    Repeats,
    ToolsBehind,
)
from tokenmill.jobs.lint.differences import Families, Member, between
from tokenmill.jobs.lint.parts import Prompt, prompt_of, shortened
from tokenmill.jobs.lint.prefixes import MAX_CHARACTERS, Misplaced, SharedPrefixes, misplaced, with_context
from tokenmill.jobs.lint.report import (
    BYTES_PER_TOKEN,
    COSTLY,
    LONG_DIGEST_TOKENS,
    MIN_REPORTED_SHARE,
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
    spell_prefix,
    spell_tail,
)
from tokenmill.jobs.lint.tokens import TokenCount, Tokens
from tokenmill.jobs.openai.call import Call, checked
from tokenmill.storage.json_text import parse, shown
from tokenmill.storage.lines import BadLine
from tokenmill.units import MIB

RECENT_PREFIXES = 256
RECENT_BYTES = 32 * MIB
TAIL_FAMILY = 128  # last messages with this many equal characters at the start are compared
LONE_PREFIX = 4096  # characters of a single text that count as its prefix
OFTEN_OWN = 0.1  # share of jobs with a unique end of the prefix from which this is reported
_OWN: tuple[Changing, ...] = ("id", "timestamp")
BAD_SHOWN = 3
"""Bad lines that are reported with a reason."""


class _State(NamedTuple):
    mask: int
    checksum: int
    bytes: int


class _Prefix(NamedTuple):
    """A prefix whose text was seen recently."""

    states: list[_State]  # the first one as it is
    without: int  # checksum without variable text
    differs: frozenset[Changing]  # from the first of its family
    bytes: int


class Lint:
    """Lints a stream of lines, passed to `add` and `bad`; `report` can be called at any time."""

    def __init__(self, *, context: int | None = None, count: TokenCount | None = None) -> None:
        self._tree = PromptTree()
        self._prefixes = SharedPrefixes()
        self._tokens = Tokens(count, context)
        self._room = AnswerRoom(count)
        self._recent: OrderedDict[str, _Prefix] = OrderedDict()
        self._recent_bytes = 0
        self._free_bytes = RECENT_BYTES
        self._spellings: dict[str, _State] = {}
        self._families = Families()
        self._differ: Counter[Changing] = Counter()  # jobs
        self._prefixes_differ: Counter[Changing] = Counter()  # jobs, without differences in last messages
        self._first_own: dict[Changing, int] = {}  # first line with such a prefix
        self._noise: Counter[Changing] = Counter()  # bytes that may be an artifact of comparing chunks
        self._jobs = self._bad = self._unlimited = 0
        self._bad_shown: list[tuple[int, str]] = []
        self._identities = Repeats()
        self._names = Repeats()
        self._again = ""
        self._order = FileOrder()
        self._tools = ToolsBehind()

    def add(self, number: int, text: str) -> None:
        """Add a line of the file."""
        try:
            line = parse(text)
            custom_id = custom_id_of(line, number)
            endpoint, body = body_of(line)
            call = Call(endpoint, checked(endpoint, body))
            identity = place("", call).identity
        except RequestRefused as error:
            self.bad(BadLine(number, f"{error.message} ({error.hint})" if error.hint else error.message))
        except UnicodeEncodeError:
            self.bad(BadLine(number, "unpaired surrogate (\\ud800 to \\udfff)"))
        except ValueError as error:
            self.bad(BadLine(number, str(error)))
        except RecursionError:
            self.bad(BadLine(number, "nested too deeply"))
        else:
            self._identities.add(identity)
            if self._names.add(sha256(custom_id.encode()).digest()):
                self._again = self._again or f"line {number} repeats {shown(custom_id)}"
            self._call(number, call)

    def bad(self, line: BadLine) -> None:
        """Add a line that cannot be run."""
        self._bad += 1
        if len(self._bad_shown) < BAD_SHOWN:
            self._bad_shown.append((line.number, line.reason))

    def _call(self, number: int, call: Call) -> None:
        self._jobs += 1
        self._unlimited += "max_tokens" not in call.values
        prompt = prompt_of(call)
        to_write = call.values.get("max_tokens")
        self._room.add(number, call.values.get("json_schema"), to_write)
        if prompt.tokens is not None:
            state = self._tree.walk(prompt.tokens, 0, EVERY, PREFIX_ENDS)
            self._tree.count(len(prompt.tokens), EVERY)
            self._tokens.numbers(number, len(prompt.tokens) // 4, to_write)
            self._order.add(str(state), "", (len(prompt.tokens), 0))
            return
        text = "".join(part.text for part in prompt.prefix)
        prefix = self._recent.get(text)
        if prefix is None:
            prefix = self._new_prefix(number, prompt, text)
        else:
            self._recent.move_to_end(text)
        tail = "".join(part.text for part in prompt.tail)
        in_tail = self._tail(number, prompt, prefix, tail)
        self._differ.update(prefix.differs | in_tail)
        self._prefixes_differ.update(prefix.differs)
        sizes = prefix.bytes, len(tail.encode())
        self._order.add(text, tail, sizes)
        self._tokens.add(number, text, tail, prefix.without, sizes, to_write)
        if prompt.tools:
            self._tools.add(prompt)

    def _new_prefix(self, number: int, prompt: Prompt, text: str) -> _Prefix:
        """Add a prefix in all its spellings to the tree, and compare it with its family."""
        spelled = spell_prefix(prompt, text)
        states = list[_State]()
        without = 0
        size = len(text.encode())
        for mask, spelling in spelled.spellings:
            state = self._walked(spelling, mask)
            states.append(state)
            without = state.checksum if mask & WITHOUT else without
        differs: frozenset[Changing] = frozenset()
        if text:
            self._prefixes.add(without, number, shortened(prompt.prefix, MAX_CHARACTERS), spelled.without, own=True)
            member = Member(number, prompt.prefix, spelled.segments, prompt.tools)
            differs = self._families.join(("prefix", without), member)
            self._noise.update(dict.fromkeys(differs, PREFIX_CHUNK))
            self._first_own = dict.fromkeys(differs, number) | self._first_own
        prefix = _Prefix(states, without, differs, size)
        self._recent[text] = prefix
        self._recent_bytes += size
        while len(self._recent) > RECENT_PREFIXES or (self._recent_bytes > RECENT_BYTES and len(self._recent) > 1):
            _, gone = self._recent.popitem(last=False)
            self._recent_bytes -= gone.bytes
        return prefix

    def _walked(self, text: str, mask: int) -> _State:
        """Add one spelling of a prefix to the tree, unless it has been added recently."""
        known = self._spellings.get(text)
        if known is not None and known.mask & mask == mask:
            return known._replace(mask=mask)
        data = text.encode()
        state = _State(mask, self._tree.walk(data, 0, mask, PREFIX_ENDS), len(data))
        self._free_bytes -= len(data)
        if len(self._spellings) >= RECENT_PREFIXES or self._free_bytes < 0:
            self._spellings.clear()
            self._free_bytes = RECENT_BYTES
        self._spellings[text] = state if known is None else state._replace(mask=mask | known.mask)
        return state

    def _tail(self, number: int, prompt: Prompt, prefix: _Prefix, text: str) -> frozenset[Changing]:
        """Add a last message after its prefix to the tree, in all spellings of both."""
        spelled = spell_tail(text)
        ends = TAIL_ENDS if prompt.prefix else LONE_ENDS
        for mask, spelling in spelled.spellings:
            data = spelling.encode()
            for prefix_mask, state, size in prefix.states:
                if both := mask & prefix_mask:
                    self._tree.walk(data, state, both, ends)
                    self._tree.count(size + len(data), both)
        without = spelled.without
        key = prefix.without
        if not prompt.prefix:
            start = without[:LONE_PREFIX]
            key = crc32(start.encode())
            self._prefixes.add(key, number, shortened(prompt.tail, LONE_PREFIX), start, own=False)
        self._prefixes.job(key)
        if spelled.segments:
            self._noise.update(dict.fromkeys(spelled.segments[0].marked.kinds(), 2 * TAIL_CHUNK))
        if not spelled.segments or len(without) < TAIL_FAMILY // 2:
            return frozenset()
        member = Member(number, shortened(prompt.tail, SCANNED), spelled.segments)
        return self._families.join((prefix.without, without[:TAIL_FAMILY]), member)

    def report(self) -> Report:
        """The findings so far."""
        tree = self._tree
        tokens = self._tokens.measured()
        total = tree.total(AS_IS)
        shared = tree.shared(AS_IS)
        # Placeholders are mostly shorter than the text that they replace: scale to the original size.
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
        findings = [found for found in findings if (found.cost_bytes or 0) >= max(256, MIN_REPORTED_SHARE * total)]
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
        """A lower bound of the bytes computed unnecessarily because of one kind of variable text."""
        tree = self._tree
        # The first includes the variable text itself, the second placeholders longer than the text that they replace.
        computed = tree.distinct(KEPT[kind]) - tree.distinct(WITHOUT)
        shared = tree.shared(WITHOUT) - tree.shared(KEPT[kind])
        return round(scale * min(computed, shared))

    def _misplaced(self) -> tuple[list[LintFinding], int]:
        """One finding per kind of misplacement, and the bytes lost outside of documents."""
        by_kind: dict[FindingKind, list[Misplaced]] = {}
        for found in misplaced(self._prefixes.all()):
            by_kind.setdefault(found.kind, []).append(found)
        scale = self._prefixes.scale
        findings = []
        for kind, every in by_kind.items():
            worst = max(every, key=lambda found: found.lost_bytes)
            first = worst.partner
            second = worst.prefix
            example = between(first.line, first.parts, worst.at, second.line, second.parts, worst.at)
            jobs = scale * sum(found.prefix.jobs for found in every)
            findings.append(LintFinding(kind, jobs, scale * sum(found.lost_bytes for found in every), example))
        return findings, sum(found.cost_bytes or 0 for found in findings if found.kind in COSTLY)

    def _own_ends(self, reported: Collection[FindingKind]) -> Iterable[LintFinding]:
        """Ids and times at the end of most prefixes, unless they are reported already; they cost little."""
        for kind in _OWN:
            jobs = self._prefixes_differ[kind]
            if kind not in reported and jobs > 1 and jobs >= OFTEN_OWN * self._jobs:
                yield LintFinding("own_end", jobs, detail=f"for example line {self._first_own[kind]}")
                return

    def _others(self, compute_bytes: int, bytes_per_token: float) -> Iterable[LintFinding]:
        """Findings without a cost in prompt bytes that is comparable to the others."""
        if self._bad:
            reasons = "; ".join(f"line {number}: {reason}" for number, reason in self._bad_shown)
            yield LintFinding("bad_line", self._bad, detail=reasons, fatal=True)
        if not self._jobs:
            yield LintFinding("empty", None)
            return
        if self._again:
            yield LintFinding("custom_id", self._names.count, detail=self._again, fatal=True)
        if longer := self._tokens.too_long():
            yield LintFinding("too_long", longer.jobs, detail=longer.detail, fatal=True)
        if small := self._room.too_small():
            yield LintFinding("answer_room", small.jobs, detail=small.detail, fatal=True)
        if own := with_context(self._prefixes.all()):
            detail = f"for example lines {own[0].line} and {own[1].line}"
            yield LintFinding("context", self._prefixes.scale * sum(prefix.jobs for prefix in own), detail=detail)
        if digest := self._tokens.long_prefixes(LONG_DIGEST_TOKENS):
            yield LintFinding("long_digest", digest.jobs, detail=digest.detail)
        if self._unlimited:
            yield LintFinding("max_tokens", self._unlimited)
        again = self._tools.cost_bytes()
        if again > MIN_REPORTED_SHARE * compute_bytes:
            yield LintFinding("tools_behind", None, again)
        if copies := self._identities.count:
            yield LintFinding("duplicates", copies)
        alternating = self._order.computed_bytes - compute_bytes
        if alternating > 0.05 * compute_bytes:
            detail = f"in this order, a single slot computes {round(alternating / bytes_per_token):,} tokens more"
            yield LintFinding("file_order", None, detail=detail)
