"""A real Chromium for tests of pages, and checks that every page must pass."""

import fcntl
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MS = 120_000
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# WCAG 2's contrast of every visible text with the first colour behind it that is not transparent; the worst five.
WORST_CONTRASTS = """() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const part = (v) => v <= 10.3147 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const shine = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const under = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const back = parts(getComputedStyle(at).backgroundColor);
      if (back.length < 4 || back[3] > 0.5) return back;
    }
    return [255, 255, 255];
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let text = walk.nextNode(); text; text = walk.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.closest('noscript, .unseen, :disabled')) continue;
    const [a, b] = [shine(parts(getComputedStyle(node).color)), shine(under(node))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.data.trim().slice(0, 40)]);
  }
  return found.sort((p, q) => p[0] - q[0]).slice(0, 5);
}"""


@dataclass
class Opened:
    """A page, and what it complained about and fetched meanwhile."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def overflows(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def worst_contrasts(self) -> list[tuple[float, str]]:
        return [(ratio, text) for ratio, text in self.page.evaluate(WORST_CONTRASTS)]


@contextmanager
def chromium() -> Iterator[Browser]:
    with (Path(tempfile.gettempdir()) / "tokenmill-tests-browser.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it may have to be installed, which only one can do at a time
        found = subprocess.run(
            [ROOT / "scripts" / "browser.sh"], capture_output=True, check=False, text=True, timeout=280
        )
    assert found.returncode == 0, found.stderr
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found.stdout.strip(), args=list(FLAGS), timeout=LIMIT_MS)
        try:
            yield launched
        finally:
            launched.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1280, height: int = 900, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Opened]:
    """A page with nothing kept from others."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    one = Opened(page)
    page.on("request", lambda asked: one.requests.append(asked.url))
    page.on("console", lambda said: one.complaints.append(said.text))
    page.on("pageerror", lambda error: one.complaints.append(str(error)))
    page.goto(url)
    try:
        yield one
    finally:
        context.close()
