"""Ways to transform an example: each is a prompt file, some with a parameter. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.seeds import Example

LANGUAGE = "language"
FORMAT = "format"
INSTRUCTION = "instruction"
USUAL = ("paraphrase", "harder", "broader")
WAYS = (*USUAL, LANGUAGE, FORMAT, INSTRUCTION)

LANGUAGES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "bn": "Bengali",
    "ca": "Catalan",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "nl": "Dutch",
    "no": "Norwegian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sr": "Serbian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
FORMATS = {
    "json": "JSON",
    "yaml": "YAML",
    "csv": "CSV",
    "table": "a Markdown table",
    "list": "a bulleted list",
    "email": "an e-mail",
    "letter": "a letter",
    "dialogue": "a dialogue",
    "summary": "a summary of two sentences",
    "steps": "numbered steps",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A way with its parameter."""

    way: str
    detail: str | None = None  # requested language or format

    @property
    def label(self) -> str:
        """The way and its parameter, for the user."""
        return self.way if self.detail is None else f"{self.way} {self.detail}"

    @property
    def words(self) -> dict[str, str]:
        """The parameter as placeholder values."""
        if self.detail is None:
            return {}
        known = LANGUAGES if self.way == LANGUAGE else FORMATS
        return {self.way: known.get(self.detail.casefold(), self.detail)}

    def takes(self, example: Example) -> bool:
        """Whether this way applies to an example."""
        if self.way == INSTRUCTION:
            return bool(example.answer)
        return bool(example.task or example.input) or (not example.before and bool(example.answer))


def variants(
    ways: Sequence[str], languages: Sequence[str], formats: Sequence[str], known: Iterable[str]
) -> tuple[Variant, ...]:
    """The requested variants in order, without duplicates. `known`: names with a prompt file."""
    asked = list(dict.fromkeys(ways)) or [*USUAL, *([LANGUAGE] if languages else []), *([FORMAT] if formats else [])]
    names = list(dict.fromkeys(known))
    for way in asked:
        if way not in names:
            hint = f"use {', '.join(names)}, or add {way}.md to the folder of --prompts"
            raise UsageError(f"unknown way {way!r}", hint=hint)
    for way, details, option in ((LANGUAGE, languages, "--languages de,fr"), (FORMAT, formats, "--formats json,table")):
        if way in asked and not details:
            raise UsageError(f"--ways {way} needs {option.split()[0]}", hint=f"add {option}")
        if details and way not in asked:
            raise UsageError(
                f"{option.split()[0]} needs the way {way}, which --ways does not include", hint=f"add {way} to --ways"
            )
    details_of = {LANGUAGE: languages, FORMAT: formats}
    found = [Variant(way, detail) for way in asked for detail in (details_of.get(way) or (None,))]
    return tuple(dict.fromkeys(found))
