"""Keeps prompt prefixes in an engine's cache from its start on. Entry point: `pin_prefixes`.

A prefix is restored from a file if possible, else computed and saved. File names are hashes of the prefix's text and
the model's identity; a prefix saved by another model, build or cache type is recomputed. llama.cpp servers have a cache
per slot: the prefix is computed in one slot, saved, and restored in the others, if a test has shown that this works.
Engines without either feature compute the prefix with an ordinary request and may evict it later. Errors become notes,
unless the engine dies.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Literal

from tokenmill.engine.engine import Chat, Engine, Prompt, Request, Sampling, Usage, answer
from tokenmill.engine.server.saved_slots import RESTORED
from tokenmill.errors import EngineDied, EngineError, TokenmillError, UsageError

_NAME_DIGITS = 20  # hexadecimal digits of each hash in a file name

PinStatus = Literal["restored", "computed", "failed"]


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A long prefix that later requests share; a `Chat` is the prefix of all chats that begin with its messages."""

    name: str
    prompt: Prompt
    tokens: int | None = None

    @property
    def text(self) -> str:
        """The text without the chat template."""
        if isinstance(self.prompt, Chat):
            return "\n".join(str(message.get("content", "")) for message in self.prompt.messages)
        return self.prompt if isinstance(self.prompt, str) else ""


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """Result of pinning one prefix."""

    name: str
    prompt_tokens: int
    reused_tokens: int | None  # already cached: restored, or shared with another prefix
    seconds: float
    how: PinStatus = "computed"
    saved: Path | None = None  # the file it was restored from or saved to


@dataclass(frozen=True, slots=True)
class PinReport:
    """Result of pinning all prefixes."""

    prefixes: tuple[PrefixResult, ...] = ()
    notes: tuple[str, ...] = ()


def read_digest(path: Path) -> PinnedPrefix:
    """Read a digest file as the system message of later chats; UsageError if it is empty or unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the digest {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the digest {path} is not UTF-8 text", hint="create it with tokenmill digest FILES -o DIGEST"
        ) from error
    if not text.strip():
        raise UsageError(f"the digest {path} is empty", hint="create it with tokenmill digest FILES -o DIGEST")
    return PinnedPrefix(path.name, Chat(({"role": "system", "content": text},)))


def saved_at(folder: Path, prefix: PinnedPrefix, owner: str, suffix: str = ".head") -> Path:
    """Path of a saved prefix; `owner` identifies the model, or the model and the engine's build."""
    prompt = prefix.prompt
    content = [prompt.messages, prompt.tools, prompt.template_arguments] if isinstance(prompt, Chat) else prompt
    plain = json.dumps(content, sort_keys=True)
    text, model = (hashlib.sha256(of.encode()).hexdigest()[:_NAME_DIGITS] for of in (plain, owner))
    return folder / f"{text}-{model}{suffix}"


async def pin_prefixes(
    engine: Engine,
    prefixes: Sequence[PinnedPrefix],
    folder: Path | None = None,
    progress: Callable[[int, PinnedPrefix], None] | None = None,
    *,
    slots: Path | None = None,
) -> PinReport:
    """Pin prefixes in an engine, in order; restores those saved in `folder` and saves the others there.

    slots: the slot folder of a llama.cpp server, which uses it instead of `folder`.
    """
    if prefixes and not engine.capabilities.keeps_prefixes:
        return PinReport((), ("this engine does not cache prefixes: every request computes its whole prompt",))
    results: list[PrefixResult] = []
    notes: list[str] = []
    slot_folder = slots if prefixes and slots is not None and await _saves_slots(engine, slots, notes) else None
    for number, prefix in enumerate(prefixes):
        if progress is not None:
            progress(number, prefix)
        try:
            if slot_folder is not None:
                slot_ids = range(number, engine.identity.slots or 1, len(prefixes))
                results.append(await _pin_in_slots(engine, prefix, slot_ids, slot_folder, notes))
            else:
                results.append(await _pin(engine, prefix, folder, notes))
        except EngineDied:
            raise
        except TokenmillError as error:
            notes.append(f"{prefix.name} is not pinned: {error}")
            results.append(PrefixResult(prefix.name, 0, None, 0.0, "failed"))
    return PinReport(tuple(results), tuple(notes))


async def _pin(engine: Engine, prefix: PinnedPrefix, folder: Path | None, notes: list[str]) -> PrefixResult:
    began = perf_counter()
    if not engine.capabilities.pins_prefixes:
        usage = await _compute(engine, prefix)
        return PrefixResult(prefix.name, usage.prompt_tokens, usage.cached_tokens, perf_counter() - began)
    path = saved_at(folder, prefix, engine.identity.model_id) if folder is not None else None
    if path is not None and path.is_file():
        await _restore(engine, prefix, path, notes)
    usage = await engine.pin_prefix(prefix.prompt)
    reused = usage.cached_tokens or 0
    # A template that prints the date makes the same text a different prefix every day.
    restored = path is not None and path.is_file() and reused >= usage.prompt_tokens - 1
    if path is not None and not restored:
        path = await _save(engine, prefix, path, notes)
    how: PinStatus = "restored" if restored else "computed"
    return PrefixResult(prefix.name, usage.prompt_tokens, reused, perf_counter() - began, how, path)


async def _saves_slots(engine: Engine, folder: Path, notes: list[str]) -> bool:
    """Test whether the engine can save its slots; adds a note if the test fails."""
    if not engine.capabilities.saves_slots:
        return False
    works, details = await engine.verify_saved_slots(folder)
    if not works:
        notes.append(details)
    return works


async def _pin_in_slots(
    engine: Engine, prefix: PinnedPrefix, slot_ids: Sequence[int], slots: Path, notes: list[str]
) -> PrefixResult:
    if not slot_ids:
        raise EngineError("there are more digests than slots", hint="increase --sequences")
    began = perf_counter()
    owner = f"{engine.identity.model_id} {engine.identity.build}"
    path = saved_at(slots, prefix, owner, ".slot")
    is_saved = path.is_file()
    if is_saved:
        try:
            await engine.restore_slot(slot_ids[0], path.name)
        except EngineDied:
            raise
        except TokenmillError as error:
            notes.append(f"{prefix.name} is recomputed: {error}")
    usage = await _compute(engine, prefix, slot_ids[0])
    reused = usage.cached_tokens or 0
    restored = is_saved and reused >= RESTORED * usage.prompt_tokens
    if not restored:
        await engine.save_slot(slot_ids[0], path.name)
    for slot_id in slot_ids[1:]:
        await engine.restore_slot(slot_id, path.name)
    how: PinStatus = "restored" if restored else "computed"
    return PrefixResult(prefix.name, usage.prompt_tokens, reused, perf_counter() - began, how, path)


async def _restore(engine: Engine, prefix: PinnedPrefix, path: Path, notes: list[str]) -> None:
    try:
        await engine.restore_prefix(path, pin=False)
    except EngineDied:
        raise
    except TokenmillError as error:
        notes.append(f"{prefix.name} is recomputed: {error}")


async def _save(engine: Engine, prefix: PinnedPrefix, path: Path, notes: list[str]) -> Path | None:
    try:
        await engine.save_prefix(prefix.prompt, path)
    except EngineDied:
        raise
    except TokenmillError as error:
        notes.append(f"{prefix.name} is pinned, but not saved: {error}")
        return None
    return path


async def _compute(engine: Engine, prefix: PinnedPrefix, slot_id: int | None = None) -> Usage:
    """Compute a prefix with a short request; adds a user message, because chat templates may require one."""
    prompt = prefix.prompt
    if isinstance(prompt, Chat):
        prompt = replace(prompt, messages=(*prompt.messages, {"role": "user", "content": "."}))
    return (await answer(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=1, slot=slot_id))).usage
