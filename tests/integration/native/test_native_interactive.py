"""Interactive requests during a batch that saturates the engine, counted in steps of the real engine on a generated
MoE.

This thread computes; requests are put into its inbox while a given step is computed.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from support.native import loaded
from tokenmill.engine.engine import Priority, Request, Sampling
from tokenmill.errors import EngineError
from tokenmill.model.synthetic import generate
from tokenmill.native.ipc_server import Cancelled, InboundMessage, IpcServer, SubmittedRequest
from tokenmill.native.kv.prefix_cache import PrefixCache
from tokenmill.native.llama.batch import BatchRow
from tokenmill.native.llama.context import Decoded, LlamaContext
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings
from tokenmill.native.scheduler import StepScheduler
from tokenmill.native.session import Session

UBATCH, SLOTS, VOCAB = 64, 4, 608
SETTINGS = ContextSettings(
    cells=4096, context=1024, sequences=24, ubatch=UBATCH, batch=4 * UBATCH, threads=1, threads_batch=1
)
BATCH_CLIENT, CHAT_CLIENT = 1, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    generate.write("moe", generate.sizes("moe", {"layers": 2, "embed": 128, "vocab": VOCAB}), path)
    with loaded(path) as made:
        yield made


class Watched(LlamaContext):
    """A context that notes every step, and during some of them lets something happen."""

    def __init__(self, model: LlamaModel, settings: ContextSettings) -> None:
        super().__init__(model, settings)
        self.rows: list[Sequence[BatchRow]] = []  # by step
        self.happens: dict[int, list[InboundMessage]] = {}  # during the step of that number, counted from 1
        self.inbox: SimpleQueue[InboundMessage | None] = SimpleQueue()

    def decode(self, rows: Sequence[BatchRow]) -> Decoded:
        self.rows.append(rows)
        for order in self.happens.pop(len(self.rows), ()):
            self.inbox.put(order)
        return super().decode(rows)

    def tokens(self, step: int) -> int:
        return sum(len(row.tokens) for row in self.rows[step - 1])


class Told(IpcServer):
    """Takes down what clients would be told, and after which step."""

    def __init__(self, context: Watched, until: int) -> None:  # deliberately no thread and no socket
        self.inbox = context.inbox
        self.first: dict[tuple[int | None, int], int] = {}  # by client and number: the step of the first token
        self.answers: dict[tuple[int | None, int], dict[str, Any]] = {}
        self.sent_before: list[int] = []  # steps that had been computed when clients were to be told
        self._context, self._until = context, until
        self.session: Session | None = None

    def send(self) -> None:
        self.sent_before.append(len(self._context.rows))

    def post(self, client: int | None, message: dict[str, Any]) -> None:
        assert "error" not in message, message
        if "piece" in message:
            self.first.setdefault((client, message["piece"]), len(self._context.rows))
        elif "answer" in message:
            self.answers[client, message["answer"]] = message
            if len(self.answers) == self._until and self.session is not None:
                self.session.stopping = True


def order(client: int, number: int, tokens: int, most: int, priority: Priority = "batch") -> SubmittedRequest:
    """A prompt like no other."""
    prompt = tuple(np.random.default_rng([client, number]).integers(3, VOCAB, tokens).tolist())
    request = Request(prompt, Sampling(temperature=0.0), max_tokens=most, priority=priority, ignore_eos=True)
    return SubmittedRequest(client, number, request, prompt, time.monotonic())


def run(
    model: LlamaModel, first: list[SubmittedRequest], happens: dict[int, list[InboundMessage]], *, slots: int = SLOTS
) -> tuple[Watched, Told]:
    """Work until all that was not cancelled is answered."""
    later = [each for orders in happens.values() for each in orders]
    cancelled = sum(isinstance(each, Cancelled) for each in later)
    context = Watched(model, SETTINGS)
    told = Told(context, len(first) + len(later) - 2 * cancelled)
    cache = PrefixCache(context, total_cells=context.cells, sequences=SETTINGS.sequences, shares=True)
    schedule = StepScheduler(
        cache, slots=slots, interactive_slots=2, budget=SETTINGS.batch, ubatch=UBATCH, context=SETTINGS.context
    )
    told.session = Session(told, model.vocab, context, cache, schedule)
    context.happens = happens
    for each in first:
        context.inbox.put(each)
    told.session.run()
    assert told.session.clock.steps == len(context.rows)
    assert cache.used <= 2 * 500, "what several prompts without a common head leave: the newest, and a chat's"
    context.close()
    return context, told


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [
        (1, 1),
        (60 - SLOTS, 1),  # with the batch's decodes and what is reserved for its prompts, a micro-batch
        (150, 3),
        (500, 10),
    ],
)
@pytest.mark.parametrize("during", [2, 17])
def test_the_first_token_comes_at_the_end_of_the_next_step_or_of_its_own_prompt(
    model: LlamaModel, during: int, tokens: int, steps: int
) -> None:
    batch = [order(BATCH_CLIENT, number, 300, 6) for number in range(10)]
    chat = order(CHAT_CLIENT, 1, tokens, 4, "interactive")
    context, told = run(model, batch, {during: [chat]})
    assert told.first[CHAT_CLIENT, 1] - during <= steps
    assert max(map(context.tokens, range(1, len(context.rows) + 1))) <= UBATCH
    after = range(during + 1, told.first[CHAT_CLIENT, 1] + 4)
    lent = sum(map(context.tokens, after)) - tokens - 3
    assert lent <= len(after) * (SLOTS + UBATCH // 4), "to the batch, until the answer was complete"
    assert context.tokens(after[-1] + 1) > UBATCH // 2, "steps are whole again"
    of_batch = [answer["usage"] for (client, _), answer in told.answers.items() if client == BATCH_CLIENT]
    assert [usage["completion_tokens"] for usage in of_batch] == [6] * 10
    assert sum(context.tokens(step) for step in range(1, len(context.rows) + 1)) == 10 * (300 + 5) + tokens + 3


def test_clients_get_one_message_per_step_before_it_is_computed(model: LlamaModel) -> None:
    batch = [order(BATCH_CLIENT, number, 40 + number, 6) for number in range(10)]
    context, told = run(model, batch, {})
    assert told.sent_before == [0, *range(len(context.rows))], "and when it had nothing to do"


def test_pinned_prefixes_leave_an_id_to_work_with(model: LlamaModel) -> None:
    context = Watched(model, replace(SETTINGS, sequences=3))
    told = Told(context, 1)
    cache = PrefixCache(context, total_cells=context.cells, sequences=3, shares=True)
    schedule = StepScheduler(cache, slots=1, interactive_slots=1, budget=256, ubatch=UBATCH, context=1024)
    told.session = session = Session(told, model.vocab, context, cache, schedule)
    prompts = [order(BATCH_CLIENT, number, 20, 1).tokens for number in range(3)]
    for prompt in (*prompts[:2], prompts[0]):
        session.pin(prompt)
    with pytest.raises(EngineError, match="2 prefixes are pinned"):
        session.pin(prompts[2])
    context.inbox.put(order(BATCH_CLIENT, 9, 20, 2))
    session.run()
    assert told.answers[BATCH_CLIENT, 9]["usage"]["completion_tokens"] == 2
    context.close()


@pytest.mark.parametrize("number", [7, None])
def test_a_cancelled_or_disconnected_request_frees_its_slot_within_a_step(
    model: LlamaModel, number: int | None
) -> None:
    waiting = order(BATCH_CLIENT, 1, 20, 3)
    context, told = run(
        model, [order(CHAT_CLIENT, 7, 30, 900), waiting], {5: [Cancelled(CHAT_CLIENT, number)]}, slots=1
    )
    assert [len(rows) for rows in context.rows] == [1] * len(context.rows)
    assert tuple(context.rows[5][0].tokens) == waiting.tokens, "the sixth step"
    assert told.first == {(CHAT_CLIENT, 7): 1, (BATCH_CLIENT, 1): 6}
