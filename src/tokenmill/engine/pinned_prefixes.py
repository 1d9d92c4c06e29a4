"""Prefixes that an engine has cached from its start: restored from files, else computed and saved. Entry point: `hold`.

A file is named after hashes of the prefix's text and the model's identity; a prefix of another model, build or cache
type is computed again. llama.cpp servers keep a copy in each slot: it is computed in one slot, saved, and restored in
the others, if a test has shown that this works. Other engines compute the prefix with an ordinary request and may evict
it later. A prefix that cannot be cached becomes a note; errors here never stop an engine.
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

_NAME_DIGITS = 20  # of a SHA-256, enough to make collisions of file names unlikely

PinResult = Literal["restored", "computed", "not held"]


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A long prefix that later requests begin with; a chat stands for all chats that begin with its messages."""

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
class WarmedHead:
    """Result for one prefix."""

    name: str
    prompt_tokens: int
    reused_tokens: int | None  # cached already: restored, or part of another prefix
    seconds: float
    how: PinResult = "computed"
    saved: Path | None = None  # the file it was restored from or saved to


@dataclass(frozen=True, slots=True)
class HeldPrefixes:
    """Results for all prefixes."""

    heads: tuple[WarmedHead, ...] = ()
    notes: tuple[str, ...] = ()


def digest_in(path: Path) -> PinnedPrefix:
    """Read a digest as the system message of later chats; UsageError if the file is empty or unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the digest {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the digest {path} is no UTF-8 text", hint="tokenmill digest FILES -o DIGEST makes one"
        ) from error
    if not text.strip():
        raise UsageError(f"the digest {path} is empty", hint="tokenmill digest FILES -o DIGEST makes one")
    return PinnedPrefix(path.name, Chat(({"role": "system", "content": text},)))


def saved_at(folder: Path, head: PinnedPrefix, owner: str, suffix: str = ".head") -> Path:
    """Return the file of a saved prefix; `owner` identifies the model, or the model and the engine's build."""
    prompt = head.prompt
    content = [prompt.messages, prompt.tools, prompt.template_arguments] if isinstance(prompt, Chat) else prompt
    plain = json.dumps(content, sort_keys=True)
    text, model = (hashlib.sha256(of.encode()).hexdigest()[:_NAME_DIGITS] for of in (plain, owner))
    return folder / f"{text}-{model}{suffix}"


async def hold(
    engine: Engine,
    heads: Sequence[PinnedPrefix],
    folder: Path | None = None,
    tell: Callable[[int, PinnedPrefix], None] | None = None,
    *,
    slots: Path | None = None,
) -> HeldPrefixes:
    """Cache prefixes in an engine, in order; restores those saved in `folder` and saves the others there.

    slots: the folder in which a llama.cpp server saves slots; such a server uses it instead of `folder`.
    """
    if heads and not engine.capabilities.keeps_prefixes:
        return HeldPrefixes((), ("this engine keeps no prompt heads: each request computes its own",))
    warmed: list[WarmedHead] = []
    notes: list[str] = []
    folder_of_slots = slots if heads and slots is not None and await _saves_slots(engine, slots, notes) else None
    for number, head in enumerate(heads):
        if tell is not None:
            tell(number, head)
        try:
            if folder_of_slots is not None:
                slot_ids = range(number, engine.identity.lanes or 1, len(heads))
                warmed.append(await _pin_in_slots(engine, head, slot_ids, folder_of_slots, notes))
            else:
                warmed.append(await _pin(engine, head, folder, notes))
        except EngineDied:
            raise
        except TokenmillError as error:
            notes.append(f"{head.name} is not held: {error}")
            warmed.append(WarmedHead(head.name, 0, None, 0.0, "not held"))
    return HeldPrefixes(tuple(warmed), tuple(notes))


async def _pin(engine: Engine, head: PinnedPrefix, folder: Path | None, notes: list[str]) -> WarmedHead:
    began = perf_counter()
    if not engine.capabilities.pins_heads:
        usage = await _compute(engine, head)
        return WarmedHead(head.name, usage.prompt_tokens, usage.cached_tokens, perf_counter() - began)
    path = saved_at(folder, head, engine.identity.model_id) if folder is not None else None
    if path is not None and path.is_file():
        await _restore(engine, head, path, notes)
    usage = await engine.pin_prefix(head.prompt)
    reused = usage.cached_tokens or 0
    # If the template prints the date, the same text is another prefix on another day.
    restored = path is not None and path.is_file() and reused >= usage.prompt_tokens - 1
    if path is not None and not restored:
        path = await _save(engine, head, path, notes)
    how: PinResult = "restored" if restored else "computed"
    return WarmedHead(head.name, usage.prompt_tokens, reused, perf_counter() - began, how, path)


async def _saves_slots(engine: Engine, folder: Path, notes: list[str]) -> bool:
    """Whether the engine's slots can be saved, verified by a test; adds a note if the test fails."""
    if not engine.capabilities.saves_slots:
        return False
    works, words = await engine.verify_saved_slots(folder)
    if not works:
        notes.append(words)
    return works


async def _pin_in_slots(
    engine: Engine, head: PinnedPrefix, slot_ids: Sequence[int], slots: Path, notes: list[str]
) -> WarmedHead:
    if not slot_ids:
        raise EngineError("there are more digests than slots", hint="more --sequences")
    began = perf_counter()
    owner = f"{engine.identity.model_id} {engine.identity.build}"
    path = saved_at(slots, head, owner, ".slot")
    read = path.is_file()
    if read:
        try:
            await engine.restore_slot(slot_ids[0], path.name)
        except EngineDied:
            raise
        except TokenmillError as error:
            notes.append(f"{head.name} is computed again: {error}")
    usage = await _compute(engine, head, slot_ids[0])
    reused = usage.cached_tokens or 0
    restored = read and reused >= RESTORED * usage.prompt_tokens
    if not restored:
        await engine.save_slot(slot_ids[0], path.name)
    for slot_id in slot_ids[1:]:
        await engine.restore_slot(slot_id, path.name)
    how: PinResult = "restored" if restored else "computed"
    return WarmedHead(head.name, usage.prompt_tokens, reused, perf_counter() - began, how, path)


async def _restore(engine: Engine, head: PinnedPrefix, path: Path, notes: list[str]) -> None:
    try:
        await engine.restore_prefix(path, pin=False)
    except EngineDied:
        raise
    except TokenmillError as error:
        notes.append(f"{head.name} is computed again: {error}")


async def _save(engine: Engine, head: PinnedPrefix, path: Path, notes: list[str]) -> Path | None:
    try:
        await engine.save_prefix(head.prompt, path)
    except EngineDied:
        raise
    except TokenmillError as error:
        notes.append(f"{head.name} is held, but not saved: {error}")
        return None
    return path


async def _compute(engine: Engine, head: PinnedPrefix, slot_id: int | None = None) -> Usage:
    """Compute a prefix as part of a short request, with a user message because templates may require one."""
    prompt = head.prompt
    if isinstance(prompt, Chat):
        prompt = replace(prompt, messages=(*prompt.messages, {"role": "user", "content": "."}))
    return (await answer(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=1, lane=slot_id))).usage
