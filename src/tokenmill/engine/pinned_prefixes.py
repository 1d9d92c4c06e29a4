"""Prompt heads that an engine holds from its start: read back where they were saved, computed and saved otherwise.

A file bears the hash of the head's text and of the model's identity, and holds whose it is: one of another model, build
or cache type is computed again and replaced. llama.cpp's servers have a head in slots, each its own copy: computed in
one, saved, and read into the others, where a probe has shown that this works. Other engines compute the head with a
request, as any user would, and keep it for as long as they like. What cannot be kept is said in a note; nothing here
stops an engine.
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

_NAME_DIGITS = 20  # of a SHA-256: two heads by chance in one file are not to be feared

PinResult = Literal["restored", "computed", "not held"]


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A long shared prompt head that later requests begin with; a chat stands for all that begin with its messages."""

    name: str
    prompt: Prompt
    tokens: int | None = None

    @property
    def text(self) -> str:
        """What it says, without what a template puts around it."""
        if isinstance(self.prompt, Chat):
            return "\n".join(str(message.get("content", "")) for message in self.prompt.messages)
        return self.prompt if isinstance(self.prompt, str) else ""


@dataclass(frozen=True, slots=True)
class WarmedHead:
    """What became of one head."""

    name: str
    prompt_tokens: int
    reused_tokens: int | None  # found in the engine already: restored, or part of another head
    seconds: float
    how: PinResult = "computed"
    saved: Path | None = None  # where it was read from or written to


@dataclass(frozen=True, slots=True)
class HeldPrefixes:
    """What became of all of them."""

    heads: tuple[WarmedHead, ...] = ()
    notes: tuple[str, ...] = ()


def digest_in(path: Path) -> PinnedPrefix:
    """A file's text as the system message of the chats to come; UsageError if it has none."""
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
    """Where a head is saved; `owner`: of the state, a model or a model's build."""
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
    """Make an engine hold heads, the first first; those saved in `folder` are read from there, others saved to it.

    `slots`: where a llama.cpp server saves its slots, which it then does instead.
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
                lanes = range(number, engine.identity.lanes or 1, len(heads))
                warmed.append(await _hold_in_slots(engine, head, lanes, folder_of_slots, notes))
            else:
                warmed.append(await _hold(engine, head, folder, notes))
        except EngineDied:
            raise
        except TokenmillError as error:
            notes.append(f"{head.name} is not held: {error}")
            warmed.append(WarmedHead(head.name, 0, None, 0.0, "not held"))
    return HeldPrefixes(tuple(warmed), tuple(notes))


async def _hold(engine: Engine, head: PinnedPrefix, folder: Path | None, notes: list[str]) -> WarmedHead:
    began = perf_counter()
    if not engine.capabilities.pins_heads:
        usage = await _asked(engine, head)
        return WarmedHead(head.name, usage.prompt_tokens, usage.cached_tokens, perf_counter() - began)
    path = saved_at(folder, head, engine.identity.model_id) if folder is not None else None
    if path is not None and path.is_file():
        await _restore(engine, head, path, notes)
    usage = await engine.pin_prefix(head.prompt)
    reused = usage.cached_tokens or 0
    # A template that writes the date makes another head of the same text on another day.
    whole = path is not None and path.is_file() and reused >= usage.prompt_tokens - 1
    if path is not None and not whole:
        path = await _save(engine, head, path, notes)
    how: PinResult = "restored" if whole else "computed"
    return WarmedHead(head.name, usage.prompt_tokens, reused, perf_counter() - began, how, path)


async def _saves_slots(engine: Engine, folder: Path, notes: list[str]) -> bool:
    """Whether the engine's slots can be saved, verified by a test; adds a note if the test fails."""
    if not engine.capabilities.saves_slots:
        return False
    works, words = await engine.verify_saved_slots(folder)
    if not works:
        notes.append(words)
    return works


async def _hold_in_slots(
    engine: Engine, head: PinnedPrefix, lanes: Sequence[int], slots: Path, notes: list[str]
) -> WarmedHead:
    if not lanes:
        raise EngineError("there are more digests than slots", hint="more --sequences")
    began = perf_counter()
    owner = f"{engine.identity.model_id} {engine.identity.build}"
    path = saved_at(slots, head, owner, ".slot")
    read = path.is_file()
    if read:
        try:
            await engine.restore_slot(lanes[0], path.name)
        except EngineDied:
            raise
        except TokenmillError as error:
            notes.append(f"{head.name} is computed again: {error}")
    usage = await _asked(engine, head, lanes[0])
    reused = usage.cached_tokens or 0
    whole = read and reused >= RESTORED * usage.prompt_tokens
    if not whole:
        await engine.save_slot(lanes[0], path.name)
    for lane in lanes[1:]:
        await engine.restore_slot(lane, path.name)
    how: PinResult = "restored" if whole else "computed"
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


async def _asked(engine: Engine, head: PinnedPrefix, lane: int | None = None) -> Usage:
    """Let an engine compute a head as part of a short request; templates may want a user's turn behind it."""
    prompt = head.prompt
    if isinstance(prompt, Chat):
        prompt = replace(prompt, messages=(*prompt.messages, {"role": "user", "content": "."}))
    return (await answer(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=1, lane=lane))).usage
