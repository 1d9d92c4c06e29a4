"""After any sequence of operations, the cells match the prefix tree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from support.kv_cells import KvCells
from tokenmill.native.kv.prefix_cache import KeepPolicy, PrefixCache
from tokenmill.native.kv.radix import as_tokens

CELLS, SEQUENCES = 40, 5
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # few values, so that prefixes are often shared
SHARED = [1] * 12


class ForestMachine(RuleBasedStateMachine):
    """A prefix cache over the model of the KV cache, with all operations of a scheduler."""

    shares = True
    cuts = True
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.cells = KvCells(CELLS, SEQUENCES, shares=self.shares, cuts=self.cuts)
        self.cache = PrefixCache(self.cells, total_cells=CELLS, sequences=SEQUENCES, shares=self.shares, cuts=self.cuts)
        self.prompts: dict[int, list[int]] = {}
        self.content: dict[int, list[int]] = {}  # what running sequences have computed
        self.pins: dict[tuple[int, ...], int] = {}  # pinned prefix -> largest part of it that has been cached since

    @rule(target=running, tokens=TOKENS | TOKENS.map(SHARED.__add__))
    def open(self, tokens: list[int]) -> object:
        match, before = self.cache.match(tokens), self.cache.used
        assert 0 <= match.ready <= match.coming < len(tokens)
        assert (match.leader is None) == (match.ready == match.coming)
        opened = self.cache.open(tokens)
        if opened is None:
            assert len(self.content) + len(self.pins) >= SEQUENCES, "an id could have been had"
            return multiple()
        assert opened.reused == match.ready
        assert self.cache.used <= before, "opening takes no cells"
        assert opened.sequence not in self.content
        self.prompts[opened.sequence] = tokens
        self.content[opened.sequence] = tokens[: opened.reused]
        return opened.sequence

    @rule(sequence=running, count=st.integers(1, 8))
    def compute(self, sequence: int, count: int) -> None:
        """A chunk of the prompt, or one token beyond it."""
        prompt, content = self.prompts[sequence], self.content[sequence]
        chunk = prompt[len(content) : len(content) + count]
        tokens = chunk or [len(content) % 3]
        fits = self.cache.available >= len(tokens)
        assert self.cache.make_room(len(tokens)) == fits
        if not fits:
            return
        self.cells.decode(sequence, len(content), tokens)
        if chunk:
            self.cache.record_prefill(sequence, len(chunk))
        else:
            self.cache.record_token(sequence, tokens[0])
        content += tokens

    @rule(
        sequence=consumes(running),
        keep=st.sampled_from(["nothing", "prompt", "all"]),
        waiting=st.lists(TOKENS | TOKENS.map(SHARED.__add__), max_size=2),
    )
    def close(self, sequence: int, keep: KeepPolicy, waiting: list[list[int]]) -> None:
        before = self.cache.used
        shared = {tuple(prompt): self.ready(prompt[:-1]) for prompt in waiting if keep == "prompt"}
        self.cache.close(sequence, keep, wanted=[as_tokens(prompt) for prompt in waiting])
        assert self.cache.used <= before
        content, kept = self.content[sequence], self.prompts[sequence]
        for prompt, length in shared.items():
            of_its_answer = list(prompt[:length]) == content[:length] and length > len(kept)
            assert self.ready(list(prompt[:-1])) >= (len(kept) if of_its_answer else length) * self.shares * self.cuts
        content = self.content.pop(sequence)
        del self.prompts[sequence]
        if keep == "all" and self.shares:
            assert self.ready(content) == len(content)

    @precondition(lambda self: not self.cuts)
    @rule(sequence=running)
    def keep_state(self, sequence: int) -> None:
        before, content = self.cache.used, self.content[sequence]
        self.cache.keep_state(sequence)
        assert self.cache.used <= before
        assert self.cells.content(sequence) == content

    @rule(sequence=consumes(running), token=st.integers(0, 2), comes_back=st.booleans())
    def pause(self, sequence: int, token: int, comes_back: bool) -> None:
        content = self.content.pop(sequence)
        del self.prompts[sequence]
        self.cache.pause(sequence)
        assert self.ready(content) == len(content) * self.shares
        if not comes_back:
            self.cache.release_paused([*content, token])

    @precondition(lambda self: self.shares)
    @rule(tokens=TOKENS.map(SHARED.__add__) | st.just(SHARED))
    def pin(self, tokens: list[int]) -> None:
        if len(self.pins) < 2:
            self.cache.pin(tokens)
            self.pins[tuple(tokens)] = self.ready(tokens) * self.cuts

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(sorted(self.pins)))
        self.cache.unpin(tokens)
        del self.pins[tokens]

    @rule(count=st.integers(1, CELLS))
    def make_room(self, count: int) -> None:
        possible, before, evicted = self.cache.available >= count, self.cache.used, self.cache.evicted
        assert self.cache.make_room(count) == possible
        assert self.cache.evicted - evicted == before - self.cache.used
        assert self.cache.free >= count if possible else self.cache.used == before

    @rule(tokens=TOKENS, fits=st.booleans())
    def restore(self, tokens: list[int], fits: bool) -> None:
        """A prefix that is loaded from a file."""
        sequence = self.cache.reserve_id()
        if sequence is None:
            return
        assert self.shares
        assert not self.cells.content(sequence)
        if not fits or not self.cache.make_room(len(tokens)):
            self.cache.release_id(sequence)
            return
        self.cells.decode(sequence, 0, tokens)
        self.cache.adopt(sequence, tokens)
        assert self.ready(tokens) == len(tokens)

    def ready(self, tokens: list[int]) -> int:
        found = self.cache.find(tokens)
        return found[1] if found else 0

    @invariant()
    def counts_the_cells(self) -> None:
        assert self.cache.used == self.cells.used
        assert self.cache.used + self.cache.free == CELLS
        assert sum(head.tokens for head in self.cache.segments()) == self.cache.used
        assert self.cache.free <= self.cache.available <= CELLS

    @invariant()
    def locks_are_those_of_running_sequences(self) -> None:
        tree = self.cache._tree
        running = [node for sequence in self.content for node in tree.ends[sequence].upward()]
        assert tree.locked_tokens == sum(len(node.tokens) for node in set(running))
        for node in tree.nodes():
            assert node.locks == running.count(node)
            assert node.parent is not None
            assert node in node.parent.children.starting_with(node.tokens[0])

    @invariant()
    def running_sequences_have_their_tokens(self) -> None:
        for sequence, content in self.content.items():
            assert self.cells.content(sequence) == content
            assert self.cache.length(sequence) == len(content)

    @invariant()
    def every_head_can_be_copied(self) -> None:
        for sequence in range(SEQUENCES):
            content = self.cells.content(sequence)
            if content and self.shares:
                found = self.cache.find(content)
                assert found is not None
                assert found[1] == len(content)
                assert self.cells.content(found[0])[: found[1]] == content

    @invariant()
    def pinned_heads_stay(self) -> None:
        for pinned, most in self.pins.items():
            there = self.ready(list(pinned))
            assert there >= most, "a pinned head was evicted"
            self.pins[pinned] = there

    @invariant()
    def no_head_is_older_than_its_tail(self) -> None:
        for node in self.cache._tree.nodes():
            assert all(child.last_used <= node.last_used for child in node.children)
            assert node.children or node.sequences, "cells that nobody holds"
            assert len(node.children) != 1 or node.sequences or node.forked, "a border without a reason"
            if any(sequence not in self.content for sequence in node.sequences):
                keepers = [sequence for sequence in node.sequences_through() if sequence not in self.content]
                assert len(keepers) == 1, "an id is wasted on what another keeps"

    def teardown(self) -> None:
        for sequence in list(self.content):
            self.cache.close(sequence, "prompt")
        for pinned in self.pins:
            self.cache.unpin(pinned)
        assert self.cache.make_room(CELLS)
        assert self.cells.used == 0
        for _ in range(SEQUENCES):
            assert self.cache.open([1, 2, 3]) is not None, "an id was lost"


class StateMachine(ForestMachine):
    """The same where a sequence cannot be cut back: a prefix is available where a state was kept, or nowhere."""

    cuts = False

    @invariant()
    def pinned_heads_stay(self) -> None:
        """Once a state at the end of a pin has been kept; running sequences move on."""
        for pinned, most in self.pins.items():
            node, reached = self.cache._pool.find(as_tokens(pinned), len(pinned))
            kept = reached == len(pinned) and not node.sequences <= self.content.keys()
            assert kept or most < len(pinned), "a pinned head was evicted"
            self.pins[pinned] = len(pinned) if kept else 0

    @invariant()
    def every_head_can_be_copied(self) -> None:
        for sequence, node in self.cache._tree.ends.items():
            content = self.cells.content(sequence)
            assert len(content) == node.end, "a state that is not where the tree has it"
            if content:
                assert self.ready(content) == len(content)

    @invariant()
    def no_head_is_older_than_its_tail(self) -> None:
        for node in self.cache._tree.nodes():
            assert all(child.last_used <= node.last_used for child in node.children)
            assert node.children or node.sequences, "cells that nobody holds"
            assert sum(sequence not in self.content for sequence in node.sequences) <= 1, "the same state twice"


class UnsharedMachine(ForestMachine):
    """The same where the architecture cannot share: nothing is ever copied or kept."""

    shares = False

    @invariant()
    def holds_nothing_but_what_runs(self) -> None:
        assert self.cache.used == sum(map(len, self.content.values()))


TestSharedForest = ForestMachine.TestCase
TestStates = StateMachine.TestCase
TestUnsharedForest = UnsharedMachine.TestCase
TestSharedForest.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStates.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestUnsharedForest.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
