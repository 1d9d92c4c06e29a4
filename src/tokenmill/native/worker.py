"""The native worker process: loads one model and serves it on a Unix socket until it is stopped.

Run as `python -m tokenmill.native.worker CONFIG`, with a `WorkerConfig` as JSON. Three threads: the main thread
computes (session.py), one talks to clients (ipc_server.py), one compiles grammars and JSON schemas (compiler.py). If
the start fails, the last line of the log is the error as JSON.
"""

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenmill.engine.engine import MAX_LOGPROBS, Capabilities, Chat, Identity, Prompt, Request
from tokenmill.engine.reasoning import opened_by
from tokenmill.errors import EngineError, RequestRefused, TokenmillError, TooLong, UsageError
from tokenmill.model.gguf import read_headers
from tokenmill.native import memory_limit, protocol
from tokenmill.native.chat.renderer import Renderer
from tokenmill.native.chat.template import SpecialTokens, template_of
from tokenmill.native.compiler import Compiler
from tokenmill.native.constraints.grammar import is_constrained
from tokenmill.native.ipc_server import IpcServer, PreparedPrompt
from tokenmill.native.kv import streams
from tokenmill.native.kv.prefix_cache import CachedPrefix, PrefixCache
from tokenmill.native.kv.radix import as_tokens, common
from tokenmill.native.llama.context import LlamaContext, check_streams
from tokenmill.native.llama.library import open_running
from tokenmill.native.llama.log import LOG_DEBUG, LlamaLog
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings
from tokenmill.native.scheduler import StepScheduler
from tokenmill.native.session import Session
from tokenmill.native.worker_config import WORKER_CONFIG, WorkerConfig, state_ids

SWITCH_S = 0.0005  # switch interval of the GIL: maximum time the compute thread waits for the IPC thread


class Worker:
    """One loaded model with one context, and the IPC server for its clients."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.began, self.began_s = datetime.now(), time.monotonic()  # local time, for templates that print the date
        self.session: Session | None = None
        self.stopping = False
        self._shown = 0.0
        self.server = IpcServer(config.socket, self._heartbeat, self.stop)
        self.server.loading(0.0, "opening llama.cpp")
        self.renderer = Renderer()
        self.library = open_running(config.library, header=config.header)
        log = LlamaLog(self.library, sink=_print)
        self.server.loading(0.0, "loading weights")
        self.model = LlamaModel.load(self.library, config.model, config.weights, self._progress, log=log)
        self.server.loading(1.0, "building the context")
        self.model.vocab.warm()
        self.compiler = Compiler(self.model.vocab)
        self.template_notes = _open_template(self.renderer, config, self.model)
        self.slots = config.slots
        self.settings = config.context
        self.settings = self._with_ids(config.context, config.slots)
        self.session = self._build(self.settings, config.slots)
        self.load_s = time.monotonic() - self.began_s

    def run(self) -> None:
        """Serve clients until `stop` is called."""
        session = self._session
        session.handlers = {
            "tokenize": self._tokenize,
            "threads": self._set_threads,
            "lanes": self._set_slots,
            "context": self._set_context,
            "pin": self._pin,
            "unpin": self._unpin,
            "save": self._save,
            "restore": self._restore,
            "prefixes": self._prefixes,
            "running": self._running,
            "stop": lambda _: self.stop(),
        }
        memory_limit.set_limit(self._gpus)
        self.server.open(self._hello(), self._prepare, self.compiler)
        try:
            if not self.stopping:
                session.run()
        finally:
            self.compiler.close()
            self.renderer.close()
            self.server.close()

    def stop(self) -> None:
        """Stop immediately, aborting the load or the current step."""
        self.stopping = True
        if self.session is not None:
            self.session.stop()

    # ---- context: `settings` describe a unified context, also if `streams` then divides it among the slots

    def _make(self, settings: ContextSettings, slots: int) -> tuple[LlamaContext, PrefixCache]:
        if settings.streams:
            settings = streams.apart(settings, slots)
        context = LlamaContext(self.model, settings)
        shares, self.no_sharing_reason = context.can_share()
        return context, PrefixCache(
            context,
            total_cells=context.cells,
            sequences=settings.sequences,
            shares=shares,
            cuts=self.model.facts.cuts,
            streams=settings.streams,
            least_copied=streams.least_copied(settings),
        )

    def _build(self, settings: ContextSettings, slots: int) -> Session:
        context, prefix_cache = self._make(settings, slots)
        scheduler = StepScheduler(
            prefix_cache,
            slots=slots,
            interactive_slots=self._interactive_slots,
            budget=settings.batch,
            ubatch=settings.ubatch,
            context=settings.context,
        )
        scheduler.streams = settings.streams
        scheduler.lockstep = settings.lockstep
        scheduler.mixes = streams.mixes(settings, self.model.settings)
        scheduler.narrow_rows = self.config.narrow_rows
        return Session(self.server, self.model.vocab, context, prefix_cache, scheduler)

    def _with_ids(self, settings: ContextSettings, slots: int) -> ContextSettings:
        """The settings with fewer sequence ids if each of them has a state, or if no prefixes are cached."""
        if not self.model.facts.shares:
            return replace(settings, sequences=slots + self.config.interactive_slots)
        if not self.model.facts.cuts:
            return replace(settings, sequences=min(settings.sequences, state_ids(slots)))
        return settings

    @property
    def _gpus(self) -> int:
        return len(self.model.settings.gpus)

    @property
    def _interactive_slots(self) -> int:
        """Slots in addition to those for batch requests; none with streams."""
        return 0 if self.settings.streams else self.config.interactive_slots

    @property
    def _session(self) -> Session:
        if self.session is None:
            raise EngineError("the engine is still loading")
        return self.session

    def _hello(self) -> protocol.Handshake:
        config = self.config
        settings = self.settings
        session = self._session
        shares = session.prefix_cache.shares
        notes = self.template_notes
        if not shares:
            copies = "slots copy prefixes from each other, and retain only their last prompt"
            effect = copies if settings.streams else "every prompt is computed in full"
            notes += (f"{effect}: {self.no_sharing_reason}",)
        identity = Identity(
            "native",
            config.name,
            config.model_id,
            self.library.description,
            settings.context,
            self.slots,
            str(config.socket),
            os.getpid(),
        )
        capabilities = Capabilities(
            shares_prefixes=shares,
            keeps_prefixes=shares,
            chooses_slots=False,
            interactive_first=True,
            pins_prefixes=shares,
            saves_prefixes=shares,
            changes_threads=True,
            changes_context=True,
            reports_cached_tokens=True,
            grammar=True,
            json_schema=True,
            logit_bias=True,
            tools_parsed=False,
            max_logprobs=MAX_LOGPROBS,
            shows_tools=self.renderer.shows_tools,
            notes=notes,
            max_slots=self._max_slots,
            changes_kv_layout=True,
            lists_contents=True,
            copies_prefixes=settings.streams,
            needs_branches=shares and not session.prefix_cache.cuts,
        )
        buffers = session.context.buffers()
        return protocol.Handshake(
            identity, capabilities, buffers, self.load_s, settings.threads, settings.threads_batch, settings.streams
        )

    @property
    def _max_slots(self) -> int:
        return self._session.prefix_cache.sequences - self._interactive_slots

    # ---- called by the IPC thread

    def _heartbeat(self) -> protocol.Heartbeat:
        return self._session.heartbeat()

    def _prepare(self, request: Request) -> PreparedPrompt:
        """Prepare a request; raises TooLong or RequestRefused."""
        text, tokens = self._rendered(request)
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
        constrained = is_constrained(request.sampling)  # the output is not reasoning, even if the template opened it
        opened = "" if constrained or request.max_tokens == 0 else opened_by(text)
        return PreparedPrompt(tokens, self._branches(tokens, request.later), opened)

    def _branches(self, tokens: tuple[int, ...], later: Iterable[Prompt]) -> tuple[int, ...]:
        """The positions at which later prompts diverge from `tokens`; a later prompt may be invalid."""
        own = as_tokens(tokens)
        found = set[int]()
        for prompt in later:
            with suppress(TokenmillError):
                other = as_tokens(self._tokens(Request(prompt)))
                found.add(common(other, own, 0, min(len(own), len(other) - 1)))
        return tuple(sorted(found - {0}))

    def _tokens(self, request: Request) -> tuple[int, ...]:
        return self._rendered(request)[1]

    def _rendered(self, request: Request) -> tuple[str, tuple[int, ...]]:
        """The text that the chat template writes, if the prompt is a chat, and the tokens of the prompt."""
        prompt = request.prompt
        vocab = self.model.vocab
        if isinstance(prompt, Chat):
            # Templates may print the date: a batch must not lose its cached prefixes at midnight.
            now = self.began if request.priority == "batch" else None
            rendered = self.renderer.render(prompt, now=now)
            return rendered.text, vocab.tokenize(rendered.text, breaks=rendered.breaks)
        if isinstance(prompt, str):
            return "", vocab.tokenize(prompt)
        wrong = next((token for token in prompt if not 0 <= token < vocab.n_tokens), None)
        if wrong is not None:
            raise RequestRefused(f"{wrong} is not a token of this model", hint=f"it has {vocab.n_tokens} tokens")
        return "", prompt

    def _progress(self, share: float) -> bool:
        if share - self._shown >= 0.002:
            self._shown = share
            self.server.loading(share, "loading weights")
        return not self.stopping

    # ---- calls

    def _tokenize(self, arguments: dict[str, Any]) -> list[int]:
        return list(self._tokens(protocol.request_of(arguments["request"])))

    def _set_threads(self, arguments: dict[str, Any]) -> Any:
        threads = int(arguments["threads"])
        threads_batch = int(arguments["threads_batch"])
        self.settings = replace(self.settings, threads=threads, threads_batch=threads_batch)
        self._session.context.set_threads(threads, threads_batch)
        return self._announce()

    def _set_slots(self, arguments: dict[str, Any]) -> Any:
        slots = int(arguments["lanes"])
        if not 1 <= slots <= self._max_slots:
            raise UsageError(f"{slots} slots do not fit a context of {self._session.prefix_cache.sequences} sequences")
        self.slots = self._session.scheduler.slots = slots
        return self._announce()

    def _set_context(self, arguments: dict[str, Any]) -> Any:
        """Build another context on the same weights; running sequences continue in it."""
        arguments = dict(arguments)
        slots = int(arguments.pop("lanes", self.slots))
        settings = self._with_ids(replace(self.settings, **arguments), slots)
        if settings.streams:  # check before the current context is closed
            check_streams(self.model.facts)
            streams.apart(settings, slots)
        session = self._session
        session.context.close()  # first: there may not be room for two
        with memory_limit.lifted(self._gpus):
            try:
                made = self._make(settings, slots)
            except TokenmillError:
                session.move_to(*self._make(self.settings, session.prefix_cache.sequences))
                raise
            session.move_to(*made)
        self.settings = settings
        self.slots = slots
        scheduler = session.scheduler
        scheduler.slots = slots
        scheduler.interactive_slots = self._interactive_slots
        scheduler.budget = settings.batch
        scheduler.ubatch = settings.ubatch
        scheduler.context = settings.context
        scheduler.streams = settings.streams
        scheduler.lockstep = settings.lockstep
        scheduler.mixes = streams.mixes(settings, self.model.settings)
        return self._announce()

    def _announce(self) -> Any:
        """Send the new handshake to future clients, and return it to the caller."""
        hello = self._hello()
        self.server.open(hello, self._prepare, self.compiler)
        return protocol.HELLO.dump_python(hello, mode="json")

    def _prefix_tokens(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        """Return the tokens that all prompts beginning with this one have in common."""
        request = protocol.request_of(arguments["request"])
        prompt = request.prompt
        if not isinstance(prompt, Chat):
            return self._tokens(request)
        first, second = (
            self._tokens(replace(request, prompt=replace(prompt, messages=(*prompt.messages, _turn(text)))))
            for text in ("0", "~")
        )
        same = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
        return first[:same]

    def _session_with_prefixes(self) -> Session:
        """The session, if it can cache prefixes; else EngineError."""
        if not self._session.prefix_cache.shares:
            raise EngineError(f"prefixes cannot be cached: {self.no_sharing_reason}")
        return self._session

    def _pin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Pin a prefix; returns its tokens and how many of them are cached."""
        session = self._session_with_prefixes()
        tokens = self._prefix_tokens(arguments)
        if len(tokens) >= self.settings.context:
            raise TooLong(
                f"the prefix has {len(tokens)} tokens and the context {self.settings.context}",
                needed_tokens=len(tokens) + 1,
                context_tokens=self.settings.context,
            )
        session.pin(tokens)
        found = session.prefix_cache.find(tokens)
        return {"tokens": tokens, "cached": found[1] if found else 0}

    def _unpin(self, arguments: dict[str, Any]) -> None:
        self._session.prefix_cache.unpin(self._prefix_tokens(arguments))

    def _save(self, arguments: dict[str, Any]) -> int:
        with memory_limit.lifted(self._gpus):  # the prefix is copied to host memory
            session = self._session_with_prefixes()
            return session.save(self._prefix_tokens(arguments), Path(arguments["path"]), self.config.model_id)

    def _restore(self, arguments: dict[str, Any]) -> int:
        pin = bool(arguments.get("pin", True))
        with memory_limit.lifted(self._gpus):
            return self._session_with_prefixes().restore(Path(arguments["path"]), self.config.model_id, pin=pin)

    def _prefixes(self, _given: dict[str, Any]) -> list[dict[str, Any]]:
        piece = self.model.vocab.piece

        def shown(segment: CachedPrefix) -> dict[str, Any]:
            text = b"".join(piece(token, special=True) for token in segment.beginning).decode(errors="replace")
            return {**asdict(segment), "beginning": text}

        return [shown(segment) for segment in self._session.prefix_cache.segments()]

    def _running(self, _given: dict[str, Any]) -> list[dict[str, Any]]:
        running = self._session.scheduler.running_sequences()
        return [{**asdict(each), "label": self._session.label(each.id)} for each in running]


def _print(level: int, text: str) -> None:
    if level > LOG_DEBUG:
        print(text, file=sys.stderr, flush=True)


def _turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _open_template(renderer: Renderer, config: WorkerConfig, model: LlamaModel) -> tuple[str, ...]:
    """Pass the model file's chat template to the renderer, and return notes for the user."""
    vocab = model.vocab
    source, notes = template_of(read_headers(config.model)[0].keys)
    protected = () if config.special_tokens_in_messages else vocab.special_texts
    tokens = SpecialTokens(vocab.bos_text, vocab.eos_text, vocab.adds_bos, vocab.adds_eos, protected)
    renderer.open(source, tokens)
    return (*notes, *renderer.notes)


def main() -> int:
    """Run one worker and return its exit status."""
    sys.setswitchinterval(SWITCH_S)
    try:
        worker = Worker(WORKER_CONFIG.validate_json(sys.argv[1]))
        worker.run()
    except TokenmillError as error:
        sys.stderr.buffer.write(protocol.line(protocol.failure(0, error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
