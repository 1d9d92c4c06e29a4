"""Hooks of the documentation site (mkdocs.yml).

Pages of docs/ link to other files of the repository. A linked file becomes part of the site: Markdown as a page, other
files as they are, a folder as a page with the text of its files. `llms.txt` lists the pages, each as Markdown.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "source/"  # where the site has what lies outside of docs/
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")
_LANGUAGES = {".md": "markdown", ".jsonl": "json", ".py": "python", ".sh": "sh", ".toml": "toml", ".service": "ini"}

_navigation: list[Navigation] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside of docs/."""
    pending = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(pending)
    while pending:
        source = pending.pop()
        for target in _links(source):
            if target in seen or target.startswith("docs/"):
                continue
            seen.add(target)
            path = ROOT / target
            if path.is_dir():
                files.append(File.generated(config, _place(target), content=_listing(path)))
            else:
                files.append(File.generated(config, _place(target), abs_src_path=str(path)))
                if path.suffix == ".md":
                    pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to their places in the site."""
    here = page.file.src_uri
    source = here.removeprefix(OUTSIDE) if here.startswith(OUTSIDE) else f"docs/{here}"

    def replace(match: re.Match[str]) -> str:
        target = _resolve(source, match[1])
        return posixpath.relpath(_place(target), posixpath.dirname(here) or ".")

    return _LINK.sub(replace, markdown)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the navigation for llms.txt."""
    _navigation[:] = [nav]
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, and the Markdown of the pages that it lists."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in _navigation[0].items:
        if isinstance(section, Page):
            lines.append(_entry(section, site))
            continue
        lines += ["", f"## {section.title}", ""]
        lines += (_entry(page, site) for page in _pages(section))
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _pages(section: object) -> Iterator[Page]:
    if isinstance(section, Page):
        yield section
    for child in getattr(section, "children", None) or ():
        yield from _pages(child)


def _entry(page: Page, site: Path) -> str:
    text = page.file.content_string
    (site / page.file.src_uri).write_text(text, encoding="utf-8")
    return f"- [{page.title}]({page.file.src_uri}): {_first_sentence(text)}"


def _first_sentence(text: str) -> str:
    """The first sentence of the first paragraph of a page, without links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = (part.strip() for part in re.split(r"\n\s*\n", text))
    prose = next(part for part in paragraphs if part and part[0] not in "#!|-<")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=[.:]) ", plain)[0].rstrip(":")


def _links(source: str) -> Iterator[str]:
    for match in _LINK.finditer((ROOT / source).read_text(encoding="utf-8")):
        target = _resolve(source, match[1])
        if (ROOT / target).exists():
            yield target


def _resolve(source: str, link: str) -> str:
    """A link of a file as a path from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _place(target: str) -> str:
    """Where the site has a file or folder of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return OUTSIDE + target + (".md" if (ROOT / target).is_dir() else "")


def _listing(folder: Path) -> str:
    """A page with the text of every file of a folder."""
    parts = [f"# {folder.relative_to(ROOT).as_posix()}\n"]
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(part.startswith((".", "__")) for part in path.relative_to(folder).parts):
            continue
        name = path.relative_to(folder).as_posix()
        text = path.read_text(encoding="utf-8").rstrip()
        parts.append(f"## {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n")
    return "\n".join(parts)
