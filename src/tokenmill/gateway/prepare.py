"""Validates a gateway before it loads a model: address, port, and a plan for every engine.

`prepare` binds the port and plans; `serving.py` loads the engines and serves. Starts no process, but downloads the
default model if it is missing.
"""

import fcntl
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from socket import socket

from tokenmill.api.engines.choose import DEFAULT_MODEL, model_path, name_after
from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import EnginePlan, plan_engine
from tokenmill.api.progress import OnProgress, ignore
from tokenmill.api.stores import keep_private
from tokenmill.api.tokens import count_digests
from tokenmill.config import Config, DigestEntry, EngineConfig, EngineEntry
from tokenmill.engine.pinned_prefixes import PinnedPrefix, read_digest
from tokenmill.errors import UsageError
from tokenmill.gateway.http.listening import bind
from tokenmill.gateway.serving import EngineSpec, check_address
from tokenmill.storage.private import private_folder


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a gateway; None: use the configuration. `engine.port` is the gateway's port."""

    host: str | None = None
    name: str | None = None
    digests: tuple[Path, ...] = ()
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True)
class PreparedGateway:
    """A validated gateway. The caller closes `resources`, which hold the port and the reserved engine name."""

    config: Config
    listening: socket
    engines: tuple[EngineSpec, ...]
    resources: ExitStack


def prepare(
    model: str | None, options: ServeOptions, config: Config, on_progress: OnProgress = ignore
) -> PreparedGateway:
    """Check the options, bind the port and plan every engine.

    Serves `model` if given, else the engines of the configuration, else the default model. Raises UsageError,
    ConfigError or DoesNotFit if they cannot be served.
    """
    config = _with_options(config, options)
    keep_private(config)
    check_address(config)
    with ExitStack() as stack:
        listening = stack.enter_context(bind(config.gateway))
        planner = _Planner(config, on_progress, stack)
        engines = planner.engines(model, options.name, replace(options.engine, port=None))
        return PreparedGateway(config, listening, engines, stack.pop_all())


def _with_options(config: Config, options: ServeOptions) -> Config:
    settings = config.gateway
    host = options.host
    port = options.engine.port
    if port is not None and not 0 <= port < 65536:
        raise UsageError(f"port must be 1-65535, or 0 to pick a free port (got {port})")
    settings = replace(
        settings, host=settings.host if host is None else host, port=settings.port if port is None else port
    )
    digests = tuple(DigestEntry(path.name, str(path)) for path in options.digests)
    try:
        return replace(config, gateway=settings, digests=(*config.digests, *digests))
    except ValueError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Planner:
    config: Config
    on_progress: OnProgress
    resources: ExitStack

    def engines(self, model: str | None, name: str | None, options: EngineOptions) -> tuple[EngineSpec, ...]:
        """The engine for `model`, or the engines of the configuration."""
        if model is not None or not self.config.engines:
            return (self._for_model(model, name, options),)
        if name is not None or options.engine is not None or not options.is_default:
            raise UsageError(
                "engine options cannot be combined with the engines of the configuration",
                hint="leave out --name and the engine options, or give a MODEL",
            )
        return tuple(self._for_entry(entry) for entry in self.config.engines)

    def _for_model(self, model: str | None, name: str | None, options: EngineOptions) -> EngineSpec:
        kind = options.engine or self.config.engine.kind
        digests = self._digests(None)
        if "://" in kind:
            engine = options.engine_config(self.config)
            served = (model,) if model else ()
            return EngineSpec(name or "upstream", served, engine, url=kind, model=model, digests=digests)
        planned, digests = self._planned(model, options, digests)
        name = name or self._free_name(name_after(model or DEFAULT_MODEL, planned))
        names = (name,) if model is None or "/" in model else (model, name)
        return EngineSpec(name, names, planned.config, planned.plan, planned.model_path, digests=digests)

    def _for_entry(self, entry: EngineEntry) -> EngineSpec:
        engine = _entry_config(entry, self.config.engine)
        digests = self._digests(entry.name)
        if "://" in engine.kind:
            names = (entry.model, *entry.aliases) if entry.model else entry.aliases
            return EngineSpec(entry.name, names, engine, url=engine.kind, model=entry.model, digests=digests)
        planned, digests = self._planned(entry.model, EngineOptions.of_entry(entry, engine.kind), digests)
        names = (entry.model or DEFAULT_MODEL, *entry.aliases)
        engine = replace(planned.config, api_key_env=engine.api_key_env)
        return EngineSpec(entry.name, names, engine, planned.plan, planned.model_path, digests=digests)

    def _planned(
        self, model: str | None, options: EngineOptions, digests: tuple[PinnedPrefix, ...]
    ) -> tuple[EnginePlan, tuple[PinnedPrefix, ...]]:
        path = str(model_path(model, self.config, self.on_progress))
        planned = plan_engine(path, options, self.config).require_fit()
        return planned, count_digests(digests, path, planned, self.config)

    def _digests(self, engine: str | None) -> tuple[PinnedPrefix, ...]:
        """The digests of an engine, with the names from the configuration."""
        return tuple(
            replace(read_digest(Path(entry.file).expanduser()), name=entry.name)
            for entry in self.config.digests
            if engine is None or not entry.engines or engine in entry.engines
        )

    def _free_name(self, name: str) -> str:
        """Reserve `name`, or NAME-2, NAME-3, ... if other running gateways use it.

        The reservation is a file lock, which the kernel releases when this process dies.
        """
        folder = self.config.state_path / "gateways"
        private_folder(folder)
        for number in count(1):
            free = name if number == 1 else f"{name}-{number}"
            lock = os.open(folder / f"{free}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self.resources.callback(os.close, lock)
            return free
        raise AssertionError("unreachable")


def _entry_config(entry: EngineEntry, given: EngineConfig) -> EngineConfig:
    return replace(
        given,
        kind=entry.url or entry.kind or given.kind,
        binary=entry.binary or given.binary,
        api_key_env=entry.api_key_env or given.api_key_env,
        port=given.port if entry.port is None else entry.port,
    )
