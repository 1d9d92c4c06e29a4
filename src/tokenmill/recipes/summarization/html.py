"""Extracts the visible text of an HTML page with its headings, paragraphs, lists and cells.

Scripts, styles and other invisible elements are dropped. Headings become Markdown, so that long pages are split there.
Tolerates damaged markup; fetches nothing.
"""

import re
from html.parser import HTMLParser

_HIDDEN = frozenset(("script", "style", "template", "noscript", "svg", "math", "iframe", "object", "canvas", "select"))
_BLOCKS = frozenset(
    (
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "center",
        "dd",
        "details",
        "dialog",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "header",
        "hr",
        "html",
        "main",
        "nav",
        "ol",
        "p",
        "pre",
        "section",
        "summary",
        "table",
        "title",
        "ul",
    )
)
_HEADINGS = {f"h{rank}": "#" * rank + " " for rank in range(1, 7)}
_LINES = frozenset(("br", "tr", "li", "caption"))
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_DECLARATION_BYTES = 2048  # bytes searched for an encoding declaration


def page_text(page: str) -> str:
    """The text of a page."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return reader.text()


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page declares; it may be wrong."""
    found = _CHARSET.search(data[:_DECLARATION_BYTES])
    return found[1].decode() if found else None


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._out = list[str]()
        self._hidden: str | None = None  # the open element whose content is hidden
        self._depth = 0  # nesting depth of elements with that name
        self._kept = 0  # open elements that preserve whitespace
        self._space = False  # whether a space follows the last word

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden is not None:
            self._depth += tag == self._hidden
        elif tag in _HIDDEN:
            self._hidden = tag
            self._depth = 1
        else:
            self._break(tag)
            self._kept += tag == "pre"
            if tag in _HEADINGS:
                self._out.append(_HEADINGS[tag])
            elif tag == "li":
                self._out.append("- ")
            elif tag in ("td", "th") and not self._at_line_start:
                self._out.append(" | ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden is None and tag not in _HIDDEN:  # in XHTML, <script/> hides nothing
            self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden is not None:
            self._depth -= tag == self._hidden
            if self._depth == 0:
                self._hidden = None
            return
        self._kept = max(0, self._kept - (tag == "pre"))
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden is not None:
            return
        if self._kept:
            self._out.append(data)
            return
        words = data.split()
        if not words:
            self._space = self._space or bool(data)
            return
        if (self._space or data[0].isspace()) and self._end not in (" ", "\n", ""):
            self._out.append(" ")
        self._out.append(" ".join(words))
        self._space = data[-1].isspace()

    @property
    def _end(self) -> str:
        return next((text[-1] for text in reversed(self._out) if text), "")

    @property
    def _at_line_start(self) -> bool:
        return self._end in ("\n", "")

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS or tag in _HEADINGS:
            self._out.append("\n\n")
        elif tag in _LINES:
            self._out.append("\n" if tag == "br" or not self._at_line_start else "")
        else:
            return
        self._space = False

    def text(self) -> str:
        """The text so far, with at most one empty line in a row."""
        joined = re.sub(r"[ \t]+\n", "\n", "".join(self._out))
        return re.sub(r"\n{3,}", "\n\n", joined).strip()
