"""The page in Chromium: no requests, no console errors, readable on a phone and with the right figures."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from support import reports
from support.chromium import Opened, chromium, opened
from tokenmill.report.collect import Results, build_report
from tokenmill.report.render import page as written

WIDE, PHONE = 1280, 390
# WCAG 2: relative luminance and contrast of two colours; those behind are looked for upwards, the page's last.
CONTRASTS = """() => {
  const rgb = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const inside = e => { const box = e.previousElementSibling;
    return e.classList.contains('inside') && box ? rgb(getComputedStyle(box).fill) : behind(e.closest('svg')); };
  const found = [];
  for (const e of document.querySelectorAll('h1, h2, h3, p, td, th, dt, dd, span, small, strong, figcaption, a, svg text')) {
    if (e.closest('.tip') || !e.checkVisibility() || !e.textContent.trim()) continue;
    const svg = e instanceof SVGElement, style = getComputedStyle(e);
    found.push([ratio(rgb(svg ? style.fill : style.color), svg ? inside(e) : behind(e)), e.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]).slice(0, 5);
}"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    bare = build_report(reports.asked(), Results(), reports.WHEN)
    texts = {"full": written(reports.full_report()), "bare": written(bare)}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture
def seen(browser: Browser, files: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Opened]:
    name, width, scheme = request.param
    with opened(browser, files[name].as_uri(), width=width, scheme=scheme) as one:
        yield one


EVERY = [(name, width, scheme) for name in ("full", "bare") for width in (WIDE, PHONE) for scheme in ("light", "dark")]


@pytest.mark.parametrize("seen", EVERY, indirect=True, ids=str)
def test_it_is_quiet_fits_the_screen_and_can_be_read(seen: Opened) -> None:
    assert [url.rpartition("/")[2] for url in seen.requests] in (["full.html"], ["bare.html"])
    assert seen.complaints == []
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
    worst = seen.page.evaluate(CONTRASTS)
    assert worst[0][0] >= 4.5, worst


@pytest.mark.parametrize("seen", [("full", WIDE, "dark")], indirect=True, ids=str)
def test_a_dark_screen_gets_a_dark_page(seen: Opened) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    assert seen.page.evaluate(colour) == "rgb(18, 22, 28)"
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate(colour) == "rgb(255, 255, 255)", "paper is white"


@pytest.mark.parametrize("seen", [("full", WIDE, "light"), ("full", PHONE, "light")], indirect=True, ids=str)
def test_the_figures_are_there_with_their_values(seen: Opened) -> None:
    page = seen.page
    shown = page.locator("figure svg:not(.swatch):visible")
    assert shown.count() == page.locator("figure").count(), "one drawing of each figure, wide or slim"
    threads = page.locator("figure[data-curve=threads] svg:visible [data-line=decode]")
    assert [(dot.get_attribute("data-x"), dot.get_attribute("data-y")) for dot in threads.all()] == [
        (f"{x}", f"{y:g}") for x, y in reports.THREADS.items()
    ]
    heights = [dot.locator(".dot").bounding_box() for dot in threads.all()]
    tops = [box["y"] for box in heights if box]
    assert tops.index(min(tops)) == list(reports.THREADS).index(14), "the best is drawn highest"
    weights = page.locator("figure[data-tier=gpu0] svg:visible [data-bar=measured] [data-item=weights]")
    assert weights.get_attribute("data-bytes") == str(57 << 30)
    reuse = page.locator("figure[data-curve=reuse] svg:visible [data-batch=batch_1] [data-item=reused]")
    assert reuse.get_attribute("data-tokens") == "52770"
    for box in (drawing.bounding_box() for drawing in shown.all()):
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= (page.viewport_size or {"width": 0})["width"]


@pytest.mark.parametrize("seen", [("full", WIDE, "light"), ("full", PHONE, "dark")], indirect=True, ids=str)
def test_a_mark_tells_its_figures_when_it_is_pointed_at(seen: Opened) -> None:
    mark = seen.page.locator("figure[data-curve=sequences] svg:visible [data-line=decode][data-x='16']")
    tip = mark.locator(".tip")
    assert tip.is_hidden()
    mark.locator(".reach").hover(force=True)
    expect(tip).to_be_visible()
    assert "91.2 tok/s" in (tip.text_content() or "")
    box = tip.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= (seen.page.viewport_size or {"width": 0})["width"]


@pytest.mark.parametrize("seen", [("full", WIDE, "light"), ("full", PHONE, "light")], indirect=True, ids=str)
def test_no_label_of_a_chart_is_cut_off_or_lies_on_another(seen: Opened) -> None:
    cut, covered = seen.page.evaluate("""() => {
      const cut = [], covered = [];
      for (const svg of document.querySelectorAll('svg.chart')) {
        if (!svg.checkVisibility()) continue;
        const frame = svg.getBoundingClientRect();
        const texts = [...svg.querySelectorAll('text')].filter(e => !e.closest('.tip'));
        const boxes = texts.map(e => [e.textContent, e.getBoundingClientRect()]);
        for (const [words, b] of boxes)
          if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
            cut.push(words);
        for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
          const [a, b] = [boxes[i][1], boxes[j][1]];
          if (a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
            covered.push([boxes[i][0], boxes[j][0]]);
        }
      }
      return [cut, covered];
    }""")
    assert cut == []
    assert covered == []
