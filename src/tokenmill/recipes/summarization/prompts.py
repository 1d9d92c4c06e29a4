"""System messages of a summary: a shared digest, then a prompt file.

Prompt files can be edited: `{words}` and `{language}` are placeholders. The digest comes first, so that all prompts
share a prefix; the system message contains nothing of the document.
"""

import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from tokenmill.errors import UsageError
from tokenmill.storage.atomic import new_file

PromptKind = Literal["document", "piece", "reduce"]
KINDS: tuple[PromptKind, ...] = ("document", "piece", "reduce")
OWN_LANGUAGE = "the language of the document"
WORDS_PER_TOKEN = 0.6  # below English's ratio, so that a summary ends before max_tokens
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_PLACES = ("words", "language")
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Prompts:
    """The system messages of a run."""

    digest: str | None
    texts: Mapping[PromptKind, str]  # with placeholders replaced

    def system(self, kind: PromptKind) -> str:
        """The complete system message."""
        return "\n\n".join(text for text in (self.digest, self.texts[kind]) if text)

    @property
    def digest_sha256(self) -> str | None:
        """Hash of the digest's text."""
        return None if self.digest is None else hashlib.sha256(self.digest.encode()).hexdigest()

    @property
    def sha256(self) -> str:
        """Hash of the prompts as sent."""
        whole = "\0".join(self.texts[kind] for kind in KINDS)
        return hashlib.sha256(whole.encode()).hexdigest()


def summary_prompts(folder: Path | None, digest: Path | None, *, max_tokens: int, language: str | None) -> Prompts:
    """Prompts from a folder, packaged ones for missing files, and the digest; raises UsageError for an invalid one."""
    if folder is not None and not any((folder / f"{kind}.md").is_file() for kind in KINDS):
        names = ", ".join(f"{kind}.md" for kind in KINDS)
        raise UsageError(
            f"{folder} has no prompt file ({names})", hint=f"tokenmill summarize --write-prompts {folder} creates them"
        )
    values = {"words": str(_words(max_tokens)), "language": language or OWN_LANGUAGE}
    texts = {kind: _filled(_prompt(folder, kind), values, f"{kind}.md") for kind in KINDS}
    return Prompts(_read(digest).strip() or None if digest is not None else None, texts)


def write_packaged(folder: Path, *, force: bool) -> tuple[Path, ...]:
    """Copy the packaged prompts to a folder; without `force`, raises UsageError if one exists."""
    targets = [folder / f"{kind}.md" for kind in KINDS]
    there = [target for target in targets if target.exists()]
    if there and not force:
        raise UsageError(f"{there[0]} exists", hint="use --force to overwrite it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the folder {folder}: {error.strerror}", hint="use another folder") from error
    for kind, target in zip(KINDS, targets, strict=True):
        with new_file(target, force=force) as file:
            file.write(_packaged(kind).encode())
    return tuple(targets)


def _words(max_tokens: int) -> int:
    words = max(5, int(max_tokens * WORDS_PER_TOKEN))
    return words // 10 * 10 if words >= 20 else words


def _packaged(kind: PromptKind) -> str:
    return (files("tokenmill.recipes") / "prompts" / "summarize" / f"{kind}.md").read_text(encoding="utf-8")


def _prompt(folder: Path | None, kind: PromptKind) -> str:
    own = None if folder is None else folder / f"{kind}.md"
    return _read(own) if own is not None and own.is_file() else _packaged(kind)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removeprefix(_BOM)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{os.fspath(path)} is not UTF-8", hint="save it as UTF-8") from error


def _filled(text: str, values: Mapping[str, str], name: str) -> str:
    for found in _PLACEHOLDER.findall(text):
        if found not in values:
            near = difflib.get_close_matches(found, _PLACES, n=1)
            hint = f"did you mean {{{near[0]}}}?" if near else "use {words} or {language}"
            raise UsageError(f"{name}: unknown placeholder {{{found}}}", hint=hint)
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text).strip()
