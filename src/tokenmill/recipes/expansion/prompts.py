"""Prompt files, which users can edit.

A file has the sections `## system` (optional) and `## user`; text before them is a comment. `{name}` is a placeholder,
`{{` and `}}` are braces. Put text that is equal for all jobs first, so that its prefix is computed once.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.jobs.template import Field, JobTemplate, read_template
from tokenmill.recipes.expansion.seeds import Example, Shape
from tokenmill.recipes.expansion.transforms import INSTRUCTION, WAYS
from tokenmill.storage.json_text import compact_json

JUDGE = "judge"
PACKAGED = (*WAYS, JUDGE)
_ROW = ("example", "instruction", "input", "output")
_HEADING = re.compile(r"^##[ \t]*(\w+)[ \t]*$", re.MULTILINE)
_SECTIONS = ("system", "user")


@dataclass(frozen=True, slots=True)
class PromptFile:
    """One prompt file."""

    name: str  # file name with extension
    sha256: str
    template: JobTemplate

    def messages(self, values: Mapping[str, str]) -> list[dict[str, str]]:
        """The messages for these values."""
        found = []
        for role, pieces in (("system", self.template.system), ("user", self.template.user)):
            if pieces is not None:
                text = "".join(values[piece.name] if isinstance(piece, Field) else piece for piece in pieces)
                found.append({"role": role, "content": text.strip()})
        return found


def expand_methods(folder: Path | None) -> list[str]:
    """Names of all ways with a prompt: packaged ones and those in the user's folder."""
    own = [] if folder is None else sorted(path.stem for path in folder.glob("*.md") if path.stem not in PACKAGED)
    return [*WAYS, *own]


def load_prompt(name: str, folder: Path | None = None) -> PromptFile:
    """The prompt of a way, from the user's folder or the package."""
    own = None if folder is None else folder / f"{name}.md"
    try:
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{folder} is not a folder", hint=f"tokenmill expand --write-prompts {folder} creates it")
        data = own.read_bytes() if own is not None and own.is_file() else _packaged(name)
    except OSError as error:
        raise UsageError(f"cannot read {own}: {error.strerror}", hint="check its permissions") from error
    where = str(own) if own is not None and own.is_file() else f"{name}.md"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{where} is not UTF-8", hint="save it as UTF-8") from None
    return parse(name, text, where)


def parse(name: str, text: str, where: str) -> PromptFile:
    """Parse a prompt file; raises UsageError with file and line."""
    parts = _sections(text, where)
    if "user" not in parts:
        raise UsageError(
            f"{where} has no section ## user", hint="tokenmill expand --write-prompts FOLDER writes examples"
        )
    try:
        template = read_template(parts["user"], parts.get("system"))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from None
    fields = placeholders(name)
    for field in template.names if template.rest_in is None else ("*",):
        if field not in fields:
            line = min(_line(part, f"{{{field}}}") for part in parts.values() if f"{{{field}}}" in part)
            near = difflib.get_close_matches(field, fields, n=1)
            known = ", ".join(f"{{{one}}}" for one in fields)
            hint = f"did you mean {{{near[0]}}}?" if near else f"use one of {known}; write {{{{ for a brace"
            raise UsageError(f"{where}, line {line}: unknown placeholder {{{field}}}", hint=hint)
    if not set(template.names) & set(_ROW):
        raise UsageError(f"{where} has no placeholder for the example", hint="add {example}")
    return PromptFile(f"{name}.md", sha256(text.encode()).hexdigest(), template)


def placeholders(name: str) -> tuple[str, ...]:
    """The placeholders allowed in a file of that name."""
    if name == JUDGE:
        return (*_ROW, "original", "way")
    return (*_ROW, "fields", *([name] if name in ("language", "format") else []))


def _sections(text: str, where: str) -> dict[str, str]:
    """The text of each section, padded with newlines to keep line numbers."""
    found: dict[str, str] = {}
    headings = [match for match in _HEADING.finditer(text) if match[1].lower() in _SECTIONS]
    for at, match in enumerate(headings):
        role = match[1].lower()
        if role in found:
            line = _line(text, match[0], match.start())
            raise UsageError(f"{where}, line {line}: a second section ## {role}", hint="remove one of the two")
        end = headings[at + 1].start() if at + 1 < len(headings) else len(text)
        found[role] = "\n" * text.count("\n", 0, match.end()) + text[match.end() : end]
    return found


def _line(text: str, what: str, start: int = 0) -> int:
    """The line number of a text, from 1."""
    return text.count("\n", 0, text.index(what, start)) + 1


def _packaged(name: str) -> bytes:
    return (files("tokenmill.recipes") / "prompts" / "expand" / f"{name}.md").read_bytes()


def write_prompts(folder: Path, names: Iterable[str] = PACKAGED) -> list[Path]:
    """Copy the packaged prompts to a folder; existing files are never overwritten."""
    paths = [folder / f"{name}.md" for name in names]
    if there := next((path for path in paths if path.exists()), None):
        raise UsageError(f"{there} exists", hint="use another folder, or remove the file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_bytes(_packaged(path.stem))
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}", hint="use a folder with write permission"
        ) from error
    return paths


def values_of(example: Example, shape: Shape) -> dict[str, str]:
    """An example as placeholder values."""
    return {
        "example": shown(example, shape),
        "instruction": example.task,
        "input": example.input,
        "output": example.answer,
    }


def shown(example: Example, shape: Shape) -> str:
    """The parts of an example with their names; a plain text as it is."""
    if not example.task and not example.input and not example.before:
        return example.answer
    role, content = shape.turn
    conversation = "\n".join(f"{turn[role]}: {turn[content]}" for turn in example.before)
    parts = (
        ("Conversation before", conversation),
        ("Instruction", example.task),
        ("Input", example.input),
        ("Output", example.answer),
    )
    return "\n\n".join(f"{name}:\n{text}" for name, text in parts if text)


def fields_of(way: str, shape: Shape, schema: object | None) -> str:
    """The output instructions for {fields}; the same for all jobs of a way."""
    if way == INSTRUCTION:
        return "Write the instruction alone, without a heading, quotes or a word about it."
    if not shape.parts:
        follows = "" if schema is None else f" It is JSON that follows this schema: {compact_json(schema)}"
        return "Write the new text alone, without a heading, quotes or a word about it." + follows
    *first, last = [f'"{part}"' for part in shape.parts]
    keys = f"{', '.join(first)} and {last}" if first else last
    empty = ' "input" is empty where the instruction needs none.' if "input" in shape.parts else ""
    follows = "" if schema is None else f' "output" is JSON that follows this schema: {compact_json(schema)}'
    return f"Write one JSON object with {keys}.{empty}{follows}"
