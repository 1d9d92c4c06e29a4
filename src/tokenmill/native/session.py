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

from tokenmill.engine.engine import Answer, Counters, FinishReason, Piece, Timings, TokenLogprob, Usage
from tokenmill.errors import EngineError, EngineTimeout, RequestRefused, TokenmillError
from tokenmill.native import protocol
from tokenmill.native.batching import DecodeStep, Id
from tokenmill.native.constraints import Masks
from tokenmill.native.detokenize import Detokeniser, Stops
from tokenmill.native.ipc_server import Cancelled, ControlCall, IpcServer, SubmittedRequest
from tokenmill.native.kv.prefix_cache import PrefixCache
from tokenmill.native.llama import state_file
from tokenmill.native.llama.context import Decoded, LlamaContext
from tokenmill.native.llama.vocab import Vocab
from tokenmill.native.sampler import Sampler
from tokenmill.native.scheduler import StepScheduler

# Nobody reads along in a batch, and every piece wakes two processes that take the cores from llama.cpp: its first is
# told at once, the others together so often.
HELD_S = 0.25
Handler = Callable[[dict[str, Any]], Any]


@dataclass(slots=True)
class Sequence:
    """A request being worked on."""

    order: SubmittedRequest
    sampler: Sampler
    most_tokens: int
    detokeniser: Detokeniser
    stops: Stops
    deadline_s: float | None
    quiet: bool  # nobody reads along, and nothing in its text can end it
    unread: list[int] = field(default_factory=list)  # tokens that have not become text yet
    text: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)  # the end of `text`
    told_s: float | None = None  # when its client heard of it last
    logprobs: list[TokenLogprob] = field(default_factory=list)
    unsent_logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    unsent_tokens: int = 0
    admitted_s: float | None = None
    queued_steps: int = 0
    first_token_s: float | None = None


@dataclass(slots=True)
class Clockwork:
    """Where the time went."""

    steps: int = 0
    step_tokens: int = 0
    generated_tokens: int = 0
    decode_s: float = 0.0
    busy_s: float = 0.0
    step_began_s: float | None = None


class Session:
    """Everything that runs on one context."""

    def __init__(
        self, hub: IpcServer, vocab: Vocab, context: LlamaContext, prefix_cache: PrefixCache, schedule: StepScheduler
    ) -> None:
        self.hub = hub
        self.vocab = vocab
        self.context = context
        self.prefix_cache = prefix_cache
        self.schedule = schedule
        self.handlers: dict[str, Handler] = {}
        self.clock = Clockwork()
        self._masks = Masks(vocab.n_tokens)
        self.stopping = False
        self._sequences: dict[Id, Sequence] = {}
        self._by_client: dict[tuple[int, int], Id] = {}
        self._next = 0

    def run(self) -> None:
        """Work until told to stop."""
        while not self.stopping:
            began = self._take()
            if self._sequences:
                self._expire(began)
                self._perform(self.schedule.plan())
                self.clock.busy_s += time.monotonic() - began

    def stop(self) -> None:
        """Leave, breaking off the step in hand; called from the other thread."""
        self.stopping = True
        self.context.abort()
        self.hub.inbox.put(None)

    def move_to(self, context: LlamaContext, prefix_cache: PrefixCache) -> None:
        """Go on in another context: heads are lost, and what was running is computed again."""
        self.context = context
        self.prefix_cache = prefix_cache
        self.schedule.restart(prefix_cache)

    def pin(self, tokens: tuple[int, ...]) -> None:
        """Keep what is or will be cached of a head; EngineError where pinned heads would leave no id to work with."""
        pins = self.prefix_cache.pins
        most = self.prefix_cache.sequences - 1
        if len(pins) >= most and not any(tuple(pin) == tokens for pin in pins):
            raise EngineError(
                f"{len(pins)} heads are pinned, and a context of {most + 1} sequences holds {most}",
                hint="unpin one that is not needed, or plan more sequences",
            )
        self.prefix_cache.pin(tokens)

    def save(self, tokens: tuple[int, ...], path: Path, model_id: str) -> int:
        """Write a head that is in the cells to a file; how many tokens it has."""
        held = self.prefix_cache.find(tokens)
        if held is None or held[1] < len(tokens):
            raise EngineError(
                f"of these {len(tokens)} tokens {held[1] if held else 0} are in the cells", hint="pin the head first"
            )
        self.context.save_sequence(held[0], path, tokens, {"model": model_id})
        return len(tokens)

    def restore(self, path: Path, model_id: str, *, pin: bool) -> int:
        """Fill cells with a saved head; how many tokens it has."""
        count = state_file.tokens_in(path)
        sequence = self.prefix_cache.take() if self.prefix_cache.room(count) else None
        if sequence is None:
            raise EngineError(f"no room for a head of {count} tokens", hint="a larger context, or fewer pinned heads")
        try:
            tokens = self.context.restore_sequence(sequence, path, {"model": model_id})
        except TokenmillError:
            self.context.cut(sequence, 0)
            self.prefix_cache.given_back(sequence)
            raise
        self.prefix_cache.adopted(sequence, tokens)
        if pin:
            self.pin(tokens)
        return len(tokens)

    def counters(self) -> Counters:
        """What has been done; read from the other thread as well."""
        clock = self.clock
        totals = self.schedule.totals
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
        )

    def beat(self) -> protocol.Beat:
        """The pulse; called from the other thread."""
        began = self.clock.step_began_s
        return protocol.Beat(None if began is None else time.monotonic() - began, self.counters())

    # ---- orders

    def _take(self) -> float:
        """Obey all orders there are, and wait for one when there is nothing to do; when the waiting ended."""
        waits = not self._sequences and not self.stopping
        began = time.monotonic()
        if not waits and self.hub.inbox.empty():
            return began
        self.hub.send()
        with suppress(Empty):
            order = self.hub.inbox.get(block=waits)
            if waits:
                began = time.monotonic()
            while True:
                if order is not None:
                    self._obey(order)
                order = self.hub.inbox.get_nowait()
        return began

    def _obey(self, order: SubmittedRequest | Cancelled | ControlCall) -> None:
        if isinstance(order, Cancelled):
            for client, number in list(self._by_client):
                if client == order.client and order.number in (None, number):
                    self._drop(self._by_client[client, number])
            return
        try:
            if isinstance(order, SubmittedRequest):
                self._submit(order)
            else:
                value = self.handlers[order.name](order.arguments)
                self.hub.tell(order.client, {"result": order.number, "value": value})
        except TokenmillError as error:
            self.hub.tell(order.client, protocol.failure(order.number, error))
        except protocol.MALFORMED as error:
            name = "submit" if isinstance(order, SubmittedRequest) else order.name
            wrong = RequestRefused(f"{name}: {type(error).__name__}: {error}")
            self.hub.tell(order.client, protocol.failure(order.number, wrong))

    def _submit(self, order: SubmittedRequest) -> None:
        request = order.request
        sampler = Sampler(
            self.vocab,
            request.sampling,
            prompt=order.tokens,
            ignore_eos=request.ignore_eos,
            constraint=order.constraint,
        )
        room = self.schedule.context - len(order.tokens)
        most = room if request.max_tokens is None else min(room, request.max_tokens)
        sequence = Sequence(
            order,
            sampler,
            most,
            Detokeniser(),
            Stops(request.stop),
            None if request.timeout_s is None else order.arrived_s + request.timeout_s,
            quiet=request.priority == "batch" and not request.stop,
        )
        self._next += 1
        self.schedule.submit(self._next, order.tokens, request.priority)
        self._sequences[self._next] = sequence
        self._by_client[order.client, order.number] = self._next

    def _expire(self, now: float) -> None:
        for number, sequence in list(self._sequences.items()):
            if sequence.deadline_s is not None and now > sequence.deadline_s:
                given = f"{sequence.order.request.timeout_s:g} s"
                late = EngineTimeout(
                    f"not done within {given}: {sequence.tokens} tokens of the answer had come",
                    hint="give it more time, or ask for fewer tokens",
                )
                self._fail(number, late)

    # ---- a step

    def _perform(self, step: DecodeStep) -> None:
        """Compute one step; where llama.cpp finds no room for it, a smaller one."""
        for ended in step.exhausted:
            self._finish(ended, "length")
        while step.work:
            decoded = self._decode(step)
            if decoded is Decoded.OK:
                self._record(step)
            if decoded is not Decoded.NO_ROOM:
                return  # broken off: the session is ending
            step = self.schedule.failed_for_room()
            for ended in step.exhausted:
                self._finish(ended, "length")

    def _decode(self, step: DecodeStep) -> Decoded:
        clock = self.clock
        began = clock.step_began_s = time.monotonic()
        for work in step.work:
            sequence = self._sequences[work.id]
            if sequence.admitted_s is None:
                sequence.admitted_s, sequence.queued_steps = began, clock.steps - sequence.order.steps
        self.hub.send()
        decoded = self.context.decode(step.work)
        clock.step_began_s = None
        clock.decode_s += time.monotonic() - began
        return decoded

    def _record(self, step: DecodeStep) -> None:
        self.clock.steps += 1
        self.clock.step_tokens += step.tokens
        self.schedule.ran(step)
        samplers = (self._sequences[work.id].sampler for work in step.work if work.logits)
        self._masks.fill([each.constraint for each in samplers if each.constraint is not None])
        row = -1
        now = time.monotonic()
        for work in step.work:
            row += len(work.tokens)
            if work.logits:
                try:
                    self._draw(work.id, row, now)
                except TokenmillError as error:  # a grammar that leads nowhere, say: its own sequence's affair
                    self._fail(work.id, error)

    def _draw(self, number: Id, row: int, now: float) -> None:
        sequence = self._sequences[number]
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        request = sequence.order.request
        if sequence.tokens >= sequence.most_tokens:  # nothing was asked for but the prompt
            self._finish(number, "length")
            return
        token = sequence.sampler.sample(self.context, row)
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
        sequence.unread.append(token)
        waits = sequence.quiet and sequence.told_s is not None and now - sequence.told_s < HELD_S
        if not waits and self._tell(sequence, self._read(sequence)):
            self._finish(number, "stop")
        elif sequence.tokens >= sequence.most_tokens:
            self._finish(number, "length")
        else:
            self.schedule.token(number, token)

    def _read(self, sequence: Sequence) -> str:
        """The text of tokens that have not become any yet."""
        text = sequence.detokeniser.add(b"".join(map(self.vocab.piece, sequence.unread)))
        sequence.unread.clear()
        return text

    def _tell(self, sequence: Sequence, text: str) -> bool:
        """Send on what cannot be part of a stop string; whether one was met."""
        ready, stopped = sequence.stops.add(text)
        self._emit(sequence, ready)
        return stopped

    def _emit(self, sequence: Sequence, text: str, *, last: bool = False) -> None:
        if text:
            sequence.text.append(text)
            sequence.untold.append(text)
        if not sequence.untold and not sequence.unsent_logprobs:
            return
        now = time.monotonic()
        waits = sequence.order.request.priority == "batch" and not last
        if waits and sequence.told_s is not None and now - sequence.told_s < HELD_S:
            return
        piece = Piece("".join(sequence.untold), sequence.unsent_tokens, tuple(sequence.unsent_logprobs))
        self.hub.tell(sequence.order.client, protocol.piece_message(sequence.order.number, piece))
        sequence.told_s = now
        sequence.unsent_tokens = 0
        sequence.untold.clear()
        sequence.unsent_logprobs.clear()

    def _finish(self, number: Id, reason: FinishReason) -> None:
        sequence = self._sequences[number]
        rest = ""
        if not sequence.stops.met:
            self._tell(sequence, self._read(sequence) + sequence.detokeniser.end())
            rest = sequence.stops.end()
        self._emit(sequence, rest, last=True)
        spent = self.schedule.finish(number)
        order = sequence.order
        now = time.monotonic()
        started = sequence.admitted_s or now
        first = sequence.first_token_s or now
        answer = Answer(
            "".join(sequence.text),
            reason,
            Usage(len(order.tokens), sequence.tokens, spent.reused),
            Timings(started - order.arrived_s, first - started, now - first, sequence.queued_steps),
            tuple(sequence.logprobs) if order.request.sampling.top_logprobs is not None else None,
            notes=order.notes,
        )
        self._forget(number)
        self.hub.tell(order.client, protocol.answer_message(order.number, answer))

    def _fail(self, number: Id, error: TokenmillError) -> None:
        order = self._sequences[number].order
        self._drop(number)
        self.hub.tell(order.client, protocol.failure(order.number, error))

    def _drop(self, number: Id) -> None:
        """End a sequence that nobody waits for; its cells are free at once."""
        self.schedule.cancel(number)
        self._forget(number)

    def _forget(self, number: Id) -> None:
        sequence = self._sequences.pop(number)
        sequence.sampler.close()
        del self._by_client[sequence.order.client, sequence.order.number]
