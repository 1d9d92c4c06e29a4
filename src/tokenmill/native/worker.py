"""The native worker: `python -m tokenmill.native.worker ORDER`, ORDER being JSON.

Loads one model, listens at a Unix socket and works until it is told to stop. Three threads: this one computes
(session.py), one talks to clients (hub.py), one compiles grammars and JSON schemas (compiler.py). A failure before it
is ready is its log's last line, as JSON.
"""

import os
import sys
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenmill.engine.engine import MOST_LOGPROBS, Capabilities, Chat, Identity, Request
from tokenmill.errors import EngineError, RequestRefused, TokenmillError, TooLong, UsageError
from tokenmill.model.gguf import read_headers
from tokenmill.native import memory_limit, protocol
from tokenmill.native.chat.renderer import Renderer
from tokenmill.native.chat.template import SpecialTokens, template_of
from tokenmill.native.compiler import Compiler
from tokenmill.native.ipc_server import IpcServer
from tokenmill.native.kv import streams
from tokenmill.native.kv.prefix_cache import PrefixCache
from tokenmill.native.llama.context import LlamaContext, check_streams
from tokenmill.native.llama.library import open_running
from tokenmill.native.llama.log import LOG_DEBUG, LlamaLog
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings
from tokenmill.native.scheduler import StepScheduler
from tokenmill.native.session import Session
from tokenmill.native.worker_config import ORDER, WorkerConfig

SWITCH_S = 0.0005  # how soon the thread that computes gets Python's lock back from the one that talks


class Worker:
    """One model, one context at a time, and those who use it."""

    def __init__(self, order: WorkerConfig) -> None:
        self.order = order
        self.began, self.began_s = datetime.now(), time.monotonic()  # local time, as templates want it
        self.session: Session | None = None
        self.stopping = False
        self._shown = 0.0
        self.hub = IpcServer(order.socket, self._beat, self.stop)
        self.hub.loading(0.0, "opening llama.cpp")
        self.renderer = Renderer()
        self.library = open_running(order.library, header=order.header)
        log = LlamaLog(self.library, sink=_print)
        self.hub.loading(0.0, "loading weights")
        self.model = LlamaModel.load(self.library, order.model, order.weights, self._progress, log=log)
        self.hub.loading(1.0, "building the context")
        self.model.vocab.warm()
        self.compiler = Compiler(self.model.vocab)
        self.template_notes = _open_template(self.renderer, order.model, self.model)
        self.lanes = order.lanes
        self.settings = order.context
        if not self.model.facts.shares:  # an id costs a state of its own, and no heads are kept
            self.settings = replace(order.context, sequences=order.lanes + order.interactive_lanes)
        self.session = self._build(self.settings, order.lanes)
        self.load_s = time.monotonic() - self.began_s

    def run(self) -> None:
        """Answer until told to stop."""
        session = self._session
        session.handlers = {
            "tokenize": self._tokenize,
            "threads": self._threads,
            "lanes": self._lanes,
            "context": self._context,
            "pin": self._pin,
            "unpin": self._unpin,
            "save": self._save,
            "restore": self._restore,
            "heads": self._heads,
            "at_work": self._at_work,
            "stop": lambda _: self.stop(),
        }
        memory_limit.set_limit(self._gpus)
        self.hub.open(self._hello(), self._prepare, self.compiler)
        try:
            if not self.stopping:
                session.run()
        finally:
            self.compiler.close()
            self.renderer.close()
            self.hub.close()

    def stop(self) -> None:
        """Leave now: a step in hand is broken off, and so is a load."""
        self.stopping = True
        if self.session is not None:
            self.session.stop()

    # ---- context: `settings` are those of a context for all together, and `streams` says whether lanes are apart in it

    def _make(self, settings: ContextSettings, lanes: int) -> tuple[LlamaContext, PrefixCache]:
        if settings.streams:
            settings = streams.apart(settings, lanes)
        context = LlamaContext(self.model, settings)
        shares, self.why_alone = context.can_cut_and_share()
        return context, PrefixCache(
            context,
            total_cells=context.cells,
            sequences=settings.sequences,
            shares=shares,
            streams=settings.streams,
            least_copied=streams.least_copied(settings),
        )

    def _build(self, settings: ContextSettings, lanes: int) -> Session:
        context, prefix_cache = self._make(settings, lanes)
        schedule = StepScheduler(
            prefix_cache,
            slots=lanes,
            interactive_slots=self._interactive_lanes,
            budget=settings.batch,
            ubatch=settings.ubatch,
            context=settings.context,
        )
        schedule.streams = settings.streams
        schedule.mixes = streams.mixes(settings, self.model.settings)
        return Session(self.hub, self.model.vocab, context, prefix_cache, schedule)

    @property
    def _gpus(self) -> int:
        return len(self.model.settings.gpus)

    @property
    def _interactive_lanes(self) -> int:
        """Lanes beyond those of the batch: streams are for batches, and have none."""
        return 0 if self.settings.streams else self.order.interactive_lanes

    @property
    def _session(self) -> Session:
        if self.session is None:
            raise EngineError("the engine is still loading")
        return self.session

    def _hello(self) -> protocol.Handshake:
        order = self.order
        settings = self.settings
        session = self._session
        shares = session.prefix_cache.shares
        notes = self.template_notes
        if not shares:
            apart = "lanes copy what others have, and keep only their last prompt"
            what = apart if settings.streams else "every prompt is computed in full"
            notes += (f"{what}: {self.why_alone}",)
        identity = Identity(
            "native",
            order.name,
            order.model_id,
            f"llama.cpp {self.library.version} ({self.library.build})",
            settings.context,
            self.lanes,
            str(order.socket),
            os.getpid(),
        )
        capabilities = Capabilities(
            shares_prefixes=shares,
            keeps_prefixes=shares,
            chooses_lanes=False,
            interactive_first=True,
            pins_heads=shares,
            saves_heads=shares,
            changes_threads=True,
            changes_context=True,
            reports_cached_tokens=True,
            grammar=True,
            json_schema=True,
            logit_bias=True,
            tools_parsed=False,
            most_logprobs=MOST_LOGPROBS,
            shows_tools=self.renderer.shows_tools,
            notes=notes,
            max_slots=self._most_lanes,
            changes_kv_layout=True,
            lists_contents=True,
        )
        buffers = session.context.buffers()
        return protocol.Handshake(
            identity, capabilities, buffers, self.load_s, settings.threads, settings.threads_batch, settings.streams
        )

    @property
    def _most_lanes(self) -> int:
        return self._session.prefix_cache.sequences - self._interactive_lanes

    # ---- the other thread asks for these

    def _beat(self) -> protocol.Beat:
        return self._session.beat()

    def _prepare(self, request: Request) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """A request's tokens; TooLong or RequestRefused."""
        tokens = self._tokens(request)
        context = self.settings.context
        if not tokens:
            raise RequestRefused("the prompt is empty", hint="an answer needs at least one token to start from")
        if len(tokens) + (request.max_tokens != 0) > context:
            raise TooLong(
                f"the prompt has {len(tokens)} tokens and the context {context}: {len(tokens) + 1 - context} too many",
                needed_tokens=len(tokens) + 1,
                context_tokens=context,
                hint="shorten the prompt, or start the engine with a larger --context",
            )
        return tokens, ()

    def _tokens(self, request: Request) -> tuple[int, ...]:
        prompt = request.prompt
        vocab = self.model.vocab
        if isinstance(prompt, Chat):
            # Templates may write the date into the head: a night's batch must not lose its heads at midnight.
            now = self.began if request.priority == "batch" else None
            return vocab.tokenise(self.renderer.render(prompt, now=now))
        if isinstance(prompt, str):
            return vocab.tokenise(prompt)
        wrong = next((token for token in prompt if not 0 <= token < vocab.n_tokens), None)
        if wrong is not None:
            raise RequestRefused(f"{wrong} is no token of this model", hint=f"it has {vocab.n_tokens} tokens")
        return prompt

    def _progress(self, share: float) -> bool:
        if share - self._shown >= 0.002:
            self._shown = share
            self.hub.loading(share, "loading weights")
        return not self.stopping

    # ---- calls

    def _tokenize(self, given: dict[str, Any]) -> list[int]:
        return list(self._tokens(protocol.request_of(given["request"])))

    def _threads(self, given: dict[str, Any]) -> Any:
        threads = int(given["threads"])
        threads_batch = int(given["threads_batch"])
        self.settings = replace(self.settings, threads=threads, threads_batch=threads_batch)
        self._session.context.set_threads(threads, threads_batch)
        return self._changed()

    def _lanes(self, given: dict[str, Any]) -> Any:
        lanes = int(given["lanes"])
        if not 1 <= lanes <= self._most_lanes:
            raise UsageError(f"{lanes} lanes do not fit a context of {self._session.prefix_cache.sequences} sequences")
        self.lanes = self._session.schedule.slots = lanes
        return self._changed()

    def _context(self, given: dict[str, Any]) -> Any:
        """Another context on the same weights; what was running goes on in it."""
        given = dict(given)
        lanes = int(given.pop("lanes", self.lanes))
        settings = replace(self.settings, **given)
        if settings.streams:  # refused before anything is given up
            check_streams(self.model.facts)
            streams.apart(settings, lanes)
        session = self._session
        session.context.close()  # first: there may not be room for two
        with memory_limit.lifted(self._gpus):
            try:
                made = self._make(settings, lanes)
            except TokenmillError:
                session.move_to(*self._make(self.settings, session.prefix_cache.sequences))
                raise
            session.move_to(*made)
        self.settings = settings
        self.lanes = lanes
        schedule = session.schedule
        schedule.slots = lanes
        schedule.interactive_slots = self._interactive_lanes
        schedule.budget = settings.batch
        schedule.ubatch = settings.ubatch
        schedule.context = settings.context
        schedule.streams = settings.streams
        schedule.mixes = streams.mixes(settings, self.model.settings)
        return self._changed()

    def _changed(self) -> Any:
        """Whoever comes from now on is greeted with what is true now, and who asked for it is told."""
        hello = self._hello()
        self.hub.open(hello, self._prepare, self.compiler)
        return protocol.HELLO.dump_python(hello, mode="json")

    def _head(self, given: dict[str, Any]) -> tuple[int, ...]:
        """The tokens that all prompts beginning like this one have in common."""
        request = protocol.request_of(given["request"])
        prompt = request.prompt
        if not isinstance(prompt, Chat):
            return self._tokens(request)
        first, second = (
            self._tokens(replace(request, prompt=replace(prompt, messages=(*prompt.messages, _turn(text)))))
            for text in ("0", "~")
        )
        same = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
        return first[:same]

    def _keeping(self) -> Session:
        """For what is done with heads, where any are kept."""
        if not self._session.prefix_cache.shares:
            raise EngineError(f"no head can be kept: {self.why_alone}")
        return self._session

    def _pin(self, given: dict[str, Any]) -> list[int]:
        session = self._keeping()
        tokens = self._head(given)
        if len(tokens) >= self.settings.context:
            raise TooLong(
                f"the head has {len(tokens)} tokens and the context {self.settings.context}",
                needed_tokens=len(tokens) + 1,
                context_tokens=self.settings.context,
            )
        session.pin(tokens)
        return list(tokens)

    def _unpin(self, given: dict[str, Any]) -> None:
        self._session.prefix_cache.unpin(self._head(given))

    def _save(self, given: dict[str, Any]) -> int:
        with memory_limit.lifted(self._gpus):  # the prefix is copied to host memory
            return self._keeping().save(self._head(given), Path(given["path"]), self.order.model_id)

    def _restore(self, given: dict[str, Any]) -> int:
        pin = bool(given.get("pin", True))
        with memory_limit.lifted(self._gpus):
            return self._keeping().restore(Path(given["path"]), self.order.model_id, pin=pin)

    def _heads(self, _given: dict[str, Any]) -> list[dict[str, Any]]:
        return [asdict(head) for head in self._session.prefix_cache.segments()]

    def _at_work(self, _given: dict[str, Any]) -> list[dict[str, Any]]:
        return [asdict(sequence) for sequence in self._session.schedule.running_sequences()]


def _print(level: int, text: str) -> None:
    if level > LOG_DEBUG:
        print(text, file=sys.stderr, flush=True)


def _turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _open_template(renderer: Renderer, path: Path, model: LlamaModel) -> tuple[str, ...]:
    """Give the renderer the template in the model file; notes for the user."""
    vocab = model.vocab
    source, notes = template_of(read_headers(path)[0].keys)
    renderer.open(source, SpecialTokens(vocab.bos_text, vocab.eos_text, vocab.adds_bos, vocab.adds_eos))
    return (*notes, *renderer.notes)


def main() -> int:
    """Run one worker to its end."""
    sys.setswitchinterval(SWITCH_S)
    try:
        worker = Worker(ORDER.validate_json(sys.argv[1]))
        worker.run()
    except TokenmillError as error:
        sys.stderr.buffer.write(protocol.line(protocol.failure(0, error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
