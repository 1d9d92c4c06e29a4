"""The compute thread of the worker: one decode step after another.

    receive messages -> plan a step -> llama_decode -> sample a token for each row -> send pieces to the clients

`Session.run` is the loop. It owns the context, the prefix cache and the sampler of every sequence. `StepScheduler`
decides which sequence runs; `IpcServer` exchanges messages with the clients on its own thread.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from tokenmill.engine.engine import Answer, Chat, Counters, FinishReason, Piece, Timings, TokenLogprob, Usage
from tokenmill.engine.output_parser import OUTPUT_MARKS
from tokenmill.errors import EngineError, EngineTimeout, RequestRefused, TokenmillError
from tokenmill.native import protocol
from tokenmill.native.batching import DecodeStep, Id
from tokenmill.native.constraints.constraints import Masks
from tokenmill.native.ipc_server import Cancelled, ControlCall, IpcServer, SubmittedRequest
from tokenmill.native.kv.prefix_cache import PrefixCache
from tokenmill.native.llama import state_file
from tokenmill.native.llama.context import Decoded, LlamaContext
from tokenmill.native.llama.vocab import Vocab
from tokenmill.native.sampling.detokenize import Detokenizer, Stops
from tokenmill.native.sampling.row_scan import Largest, RowScan
from tokenmill.native.sampling.sampler import Sampler
from tokenmill.native.scheduler import StepScheduler

# Every piece wakes two processes that take cores from llama.cpp, and no user follows the text of a batch request: its
# first piece is sent immediately, later ones at this interval, or a longer one if that would be too many pieces.
SEND_INTERVAL_S = 0.25
NARROW_SHARE = 4.0  # narrow steps may take this many times as long as the last step with the batch, before its next one
MAX_PIECES_S = 400
Handler = Callable[[dict[str, Any]], Any]


@dataclass(slots=True)
class Sequence:
    """A request in flight."""

    submitted: SubmittedRequest
    sampler: Sampler
    max_tokens: int
    detokenizer: Detokenizer
    stops: Stops
    deadline_s: float | None
    deferred: bool  # a batch request without stop strings: tokens become text only when a piece is sent
    undecoded: list[int] = field(default_factory=list)  # tokens that have not become text yet
    text: list[str] = field(default_factory=list)
    unsent_text: list[str] = field(default_factory=list)  # the end of `text`
    last_sent_s: float | None = None  # time of its last piece
    logprobs: list[TokenLogprob] = field(default_factory=list)
    unsent_logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    unsent_tokens: int = 0
    admitted_s: float | None = None
    queued_steps: int = 0
    first_token_s: float | None = None


@dataclass(slots=True)
class StepClock:
    """Step counts and the time spent in them."""

    steps: int = 0
    step_tokens: int = 0
    generated_tokens: int = 0
    decode_s: float = 0.0
    busy_s: float = 0.0
    step_began_s: float | None = None
    batch_step_s: float | None = None  # the last step with batch requests
    narrow_s: float = 0.0  # steps without batch requests since then


class Session:
    """Runs all sequences of one context."""

    def __init__(
        self,
        server: IpcServer,
        vocab: Vocab,
        context: LlamaContext,
        prefix_cache: PrefixCache,
        scheduler: StepScheduler,
    ) -> None:
        self.server = server
        self.vocab = vocab
        self.context = context
        self.prefix_cache = prefix_cache
        self.scheduler = scheduler
        self.handlers: dict[str, Handler] = {}
        self.clock = StepClock()
        self._marks = frozenset(token for mark in OUTPUT_MARKS if (token := vocab.token_of(mark)) is not None)
        self._masks = Masks(vocab.n_tokens)
        self._scan = RowScan(context.settings.threads)
        self.stopping = False
        self._sequences: dict[Id, Sequence] = {}
        self._by_client: dict[tuple[int, int], Id] = {}
        self._next = 0

    def run(self) -> None:
        """Receive messages and decode steps until `stop` is called."""
        while not self.stopping:
            began = self._receive()
            if self._sequences:
                self.clock.step_began_s = time.monotonic()
                self._expire(began)
                self.scheduler.pauses_batch = self._pauses_batch
                self._perform(self.scheduler.plan())
                self.clock.busy_s += time.monotonic() - began
                self.clock.step_began_s = None

    @property
    def _pauses_batch(self) -> bool:
        """Whether interactive requests may run without the batch, which gets at least a fifth of the time."""
        wide_s = self.clock.batch_step_s
        return self.scheduler.narrow_rows > 0 and wide_s is not None and self.clock.narrow_s < NARROW_SHARE * wide_s

    def stop(self) -> None:
        """Make `run` return and abort the current step; called from the IPC thread."""
        self.stopping = True
        self.context.abort()
        self.server.inbox.put(None)

    def move_to(self, context: LlamaContext, prefix_cache: PrefixCache) -> None:
        """Continue in another context: cached prefixes are lost, and running sequences are computed again."""
        self.context = context
        self.prefix_cache = prefix_cache
        self.scheduler.restart(prefix_cache)

    def pin(self, tokens: tuple[int, ...]) -> None:
        """Pin a prefix, cached now or later; EngineError if the pins would leave no sequence id for requests."""
        pins = self.prefix_cache.pins
        most = self.prefix_cache.sequences - 1
        if len(pins) >= most and not any(tuple(pin) == tokens for pin in pins):
            raise EngineError(
                f"{len(pins)} prefixes are pinned, the maximum for a context of {most + 1} sequences",
                hint="unpin one that is not needed, or plan more sequences",
            )
        self.prefix_cache.pin(tokens)

    def save(self, tokens: tuple[int, ...], path: Path, model_id: str) -> int:
        """Write a cached prefix to a file, and return its number of tokens."""
        found = self.prefix_cache.find(tokens)
        if found is None or found[1] < len(tokens):
            raise EngineError(
                f"only {found[1] if found else 0} of the prefix's {len(tokens)} tokens are cached",
                hint="pin the prefix first",
            )
        self.context.save_sequence(found[0], path, tokens, {"model": model_id})
        return len(tokens)

    def restore(self, path: Path, model_id: str, *, pin: bool) -> int:
        """Load a saved prefix into the cells, and return its number of tokens."""
        count = state_file.tokens_in(path)
        sequence = self.prefix_cache.reserve_id() if self.prefix_cache.make_room(count) else None
        if sequence is None:
            raise EngineError(
                f"no room for a prefix of {count} tokens", hint="use a larger context, or pin fewer prefixes"
            )
        try:
            tokens = self.context.restore_sequence(sequence, path, {"model": model_id})
        except TokenmillError:
            self.context.cut(sequence, 0)
            self.prefix_cache.release_id(sequence)
            raise
        self.prefix_cache.adopt(sequence, tokens)
        if pin:
            self.pin(tokens)
        return len(tokens)

    def label(self, number: Id) -> str | None:
        """The name that the client gave to a request, for display."""
        sequence = self._sequences.get(number)
        return None if sequence is None else sequence.submitted.request.label

    def counters(self) -> Counters:
        """Counters since the start; also read by the IPC thread."""
        clock = self.clock
        totals = self.scheduler.totals
        return Counters(
            prompt_tokens_computed=totals.prompt_tokens_computed,
            prompt_tokens_reused=totals.prompt_tokens_reused,
            generated_tokens=clock.generated_tokens,
            steps=clock.steps,
            step_tokens=clock.step_tokens,
            decode_s=clock.decode_s,
            busy_s=clock.busy_s,
            cells_used=self.prefix_cache.used,
            cells_total=self.prefix_cache.total_cells,
            running=totals.running,
            waiting=totals.waiting,
            evicted_tokens=totals.evicted_tokens,
            preemptions=totals.preemptions,
            slot_steps=totals.slot_steps,
            limited_steps=totals.limited_steps,
            batch_step_s=clock.batch_step_s,
        )

    def heartbeat(self) -> protocol.Heartbeat:
        """The current heartbeat; called from the IPC thread."""
        began = self.clock.step_began_s
        return protocol.Heartbeat(None if began is None else time.monotonic() - began, self.counters())

    # ---- messages

    def _receive(self) -> float:
        """Handle all queued messages, after waiting for one if no sequence is in flight; return when the wait ended."""
        waits = not self._sequences and not self.stopping
        began = time.monotonic()
        if not waits and self.server.inbox.empty():
            return began
        self.server.send()
        with suppress(Empty):
            message = self.server.inbox.get(block=waits)
            if waits:
                began = time.monotonic()
            while True:
                if message is not None:
                    self._handle(message)
                message = self.server.inbox.get_nowait()
        return began

    def _handle(self, message: SubmittedRequest | Cancelled | ControlCall) -> None:
        if isinstance(message, Cancelled):
            for client, number in list(self._by_client):
                if client == message.client and message.number in (None, number):
                    self._cancel(self._by_client[client, number])
            return
        try:
            if isinstance(message, SubmittedRequest):
                self._submit(message)
            else:
                value = self.handlers[message.name](message.arguments)
                self.server.post(message.client, {"result": message.number, "value": value})
        except TokenmillError as error:
            self.server.post(message.client, protocol.failure(message.number, error))
        except protocol.MALFORMED as error:
            name = "submit" if isinstance(message, SubmittedRequest) else message.name
            wrong = RequestRefused(f"{name}: {type(error).__name__}: {error}")
            self.server.post(message.client, protocol.failure(message.number, wrong))

    def _submit(self, submitted: SubmittedRequest) -> None:
        request = submitted.request
        sampler = Sampler(
            self.vocab,
            request.sampling,
            prompt=submitted.tokens,
            ignore_eos=request.ignore_eos,
            constraint=submitted.constraint,
        )
        room = self.scheduler.context - len(submitted.tokens)
        most = room if request.max_tokens is None else min(room, request.max_tokens)
        sequence = Sequence(
            submitted,
            sampler,
            most,
            Detokenizer(),
            Stops(request.stop),
            None if request.timeout_s is None else submitted.arrived_s + request.timeout_s,
            deferred=request.priority == "batch" and not request.stop,
        )
        if submitted.opened:  # the answer contains both tags, as if the model had written the first one too
            sequence.text.append(submitted.opened)
            sequence.unsent_text.append(submitted.opened)
        self._next += 1
        self.scheduler.submit(self._next, submitted.tokens, request.priority, branches=submitted.branches)
        self._sequences[self._next] = sequence
        self._by_client[submitted.client, submitted.number] = self._next

    def _expire(self, now: float) -> None:
        for number, sequence in list(self._sequences.items()):
            if sequence.deadline_s is not None and now > sequence.deadline_s:
                given = f"{sequence.submitted.request.timeout_s:g} s"
                late = EngineTimeout(
                    f"not done within {given}: {sequence.tokens} tokens of the answer had come",
                    hint="give it more time, or ask for fewer tokens",
                )
                self._fail(number, late)

    # ---- a step

    def _perform(self, step: DecodeStep) -> None:
        """Decode one step, or a smaller one if llama.cpp finds too few free cells."""
        for ended in step.exhausted:
            self._finish(ended, "length")
        while step.work:
            decoded = self._decode(step)
            if decoded is Decoded.OK:
                self._record(step)
            if decoded is not Decoded.NO_ROOM:
                return  # aborted by `stop`
            step = self.scheduler.failed_for_room()
            for ended in step.exhausted:
                self._finish(ended, "length")

    def _decode(self, step: DecodeStep) -> Decoded:
        clock = self.clock
        began = time.monotonic()
        for work in step.work:
            if work.id is None:
                continue
            sequence = self._sequences[work.id]
            if sequence.admitted_s is None:
                sequence.admitted_s, sequence.queued_steps = began, clock.steps - sequence.submitted.steps
        self.server.send()
        decoded = self.context.decode(step.work)
        self._count(step, time.monotonic() - began)
        return decoded

    def _count(self, step: DecodeStep, seconds: float) -> None:
        """Account for the time of a step."""
        clock = self.clock
        clock.decode_s += seconds
        numbers = (work.id for work in step.work if work.id is not None)
        if any(self._sequences[number].submitted.request.priority == "batch" for number in numbers):
            clock.batch_step_s, clock.narrow_s = seconds, 0.0
        else:
            clock.narrow_s += seconds

    def _record(self, step: DecodeStep) -> None:
        self.clock.steps += 1
        self.clock.step_tokens += step.tokens
        self.scheduler.ran(step)
        samplers = [self._sequences[work.id].sampler for work in step.work if work.logits and work.id is not None]
        self._masks.fill([each.constraint for each in samplers if each.constraint is not None])
        largest = iter(self._scan.scan(self.context.logits_matrix(), [each.wanted_largest for each in samplers]))
        row = -1
        now = time.monotonic()
        for work in step.work:
            row += len(work.tokens)
            if work.logits and work.id is not None:
                try:
                    self._sample(work.id, row, now, next(largest))
                except TokenmillError as error:  # only this sequence fails, e.g. because its grammar has a dead end
                    self._fail(work.id, error)

    def _sample(self, number: Id, row: int, now: float, largest: Largest | None) -> None:
        sequence = self._sequences[number]
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        request = sequence.submitted.request
        if sequence.tokens >= sequence.max_tokens:  # max_tokens is 0: only the prompt was to be computed
            self._finish(number, "length")
            return
        token = sequence.sampler.sample(self.context, row, largest)
        self.clock.generated_tokens += 1
        sequence.tokens += 1
        ends = self.vocab.is_end(token)
        if request.sampling.top_logprobs is not None and not (ends and not request.ignore_eos):
            found = sequence.sampler.logprobs(self.context, row, token, request.sampling.top_logprobs)
            sequence.logprobs.append(found)
            sequence.unsent_logprobs.append(found)
        if ends and not request.ignore_eos:
            self._finish(number, "stop")
            return
        sequence.unsent_tokens += 1
        sequence.undecoded.append(token)
        waits = sequence.deferred and sequence.last_sent_s is not None and now - sequence.last_sent_s < self._interval_s
        if not waits and self._add_text(sequence, self._decode_text(sequence)):
            self._finish(number, "stop")
        elif sequence.tokens >= sequence.max_tokens:
            self._finish(number, "length")
        else:
            self.scheduler.token(number, token)

    @property
    def _interval_s(self) -> float:
        """Minimum time between two pieces of a batch request."""
        return max(SEND_INTERVAL_S, len(self._sequences) / MAX_PIECES_S)

    def _decode_text(self, sequence: Sequence) -> str:
        """Detokenize the tokens that have not become text yet."""
        marks = self._marks if isinstance(sequence.submitted.request.prompt, Chat) else frozenset()
        pieces = [self.vocab.piece(token, special=token in marks) for token in sequence.undecoded]
        text = sequence.detokenizer.add(b"".join(pieces))
        sequence.undecoded.clear()
        return text

    def _add_text(self, sequence: Sequence, text: str) -> bool:
        """Send text that cannot be part of a stop string; return whether a stop string was found."""
        ready, stopped = sequence.stops.add(text)
        self._send_piece(sequence, ready)
        return stopped

    def _send_piece(self, sequence: Sequence, text: str, *, last: bool = False) -> None:
        if text:
            sequence.text.append(text)
            sequence.unsent_text.append(text)
        if not sequence.unsent_text and not sequence.unsent_logprobs:
            return
        now = time.monotonic()
        waits = sequence.submitted.request.priority == "batch" and not last
        if waits and sequence.last_sent_s is not None and now - sequence.last_sent_s < self._interval_s:
            return
        piece = Piece("".join(sequence.unsent_text), sequence.unsent_tokens, tuple(sequence.unsent_logprobs))
        self.server.post(sequence.submitted.client, protocol.piece_message(sequence.submitted.number, piece))
        sequence.last_sent_s = now
        sequence.unsent_tokens = 0
        sequence.unsent_text.clear()
        sequence.unsent_logprobs.clear()

    def _finish(self, number: Id, reason: FinishReason) -> None:
        sequence = self._sequences[number]
        rest = ""
        if not sequence.stops.met:
            self._add_text(sequence, self._decode_text(sequence) + sequence.detokenizer.end())
            rest = sequence.stops.end()
        self._send_piece(sequence, rest, last=True)
        spent = self.scheduler.finish(number)
        submitted = sequence.submitted
        now = time.monotonic()
        started = sequence.admitted_s or now
        first = sequence.first_token_s or now
        answer = Answer(
            "".join(sequence.text),
            reason,
            Usage(len(submitted.tokens), sequence.tokens, spent.reused),
            Timings(started - submitted.arrived_s, first - started, now - first, sequence.queued_steps),
            tuple(sequence.logprobs) if submitted.request.sampling.top_logprobs is not None else None,
        )
        self._remove(number)
        self.server.post(submitted.client, protocol.answer_message(submitted.number, answer))

    def _fail(self, number: Id, error: TokenmillError) -> None:
        submitted = self._sequences[number].submitted
        self._cancel(number)
        self.server.post(submitted.client, protocol.failure(submitted.number, error))

    def _cancel(self, number: Id) -> None:
        """End a sequence and free its cells immediately."""
        self.scheduler.cancel(number)
        self._remove(number)

    def _remove(self, number: Id) -> None:
        sequence = self._sequences.pop(number)
        sequence.sampler.close()
        del self._by_client[sequence.submitted.client, sequence.submitted.number]
