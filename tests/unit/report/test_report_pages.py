"""The page and the Markdown: complete, self-contained, with the origin of every figure, and safe for hostile names."""

import re
from base64 import b64encode
from dataclasses import replace
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import reports
from tokenmill.hardware.catalog import find
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import JobTime, Plan, Shortfall
from tokenmill.report import plan_text, result_text
from tokenmill.report.charts import error_bar, front_chart, line_chart
from tokenmill.report.collect import Results, Subject, build_report
from tokenmill.report.compare import pictures
from tokenmill.report.curves import front_of
from tokenmill.report.render import bar, fenced, markdown, page, plain
from tokenmill.report.report import ChartCurve, Dot, FigureOrigin, ReportPage, Series

FULL = reports.full_report()
EMPTY = build_report(Subject(reports.asked().machine), Results(), reports.WHEN)
VOID = {"meta", "br", "hr", "link"}


class Reader(HTMLParser):
    """Elements and text of a page; every element must be closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words += data


def renamed(name: str, build: str = "b1") -> ReportPage:
    assert FULL.model is not None
    assert FULL.point is not None
    point = replace(FULL.point, knee=name, given_up=(name,), place=replace(FULL.point.place, build=build))
    batch = replace(FULL.reuse[0], source=name)
    return replace(
        FULL,
        model=replace(FULL.model, name=name),
        point=point,
        reuse=(batch,),
        machine=replace(FULL.machine, name=name),
    )


@pytest.mark.parametrize("report", [FULL, EMPTY], ids=["full", "empty"])
def test_a_page_needs_nothing_but_itself(report: ReportPage) -> None:
    text = page(report)
    found = Reader(text)
    tags = {tag for tag, _ in found.seen}
    assert not tags & {"link", "img", "iframe", "object", "embed", "form", "input", "base"}
    assert not re.search(r"https?:|url\(|@import|javascript:", text)
    assert not any(name.startswith("on") for _, attrs in found.seen for name in attrs)
    assert all((attrs["href"] or "").startswith("#") for tag, attrs in found.seen if tag == "a")
    policy = next(attrs for tag, attrs in found.seen if attrs.get("http-equiv"))
    assert (policy["content"] or "").startswith("default-src 'none'")
    (script,) = re.findall(r"<script>(.*?)</script>", text)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in (policy["content"] or "")


def test_a_report_begins_with_the_verdict() -> None:
    plan = FULL.plan
    assert plan is not None
    fitting = replace(plan, fits=True, decode_tok_s=7.4, jobs=(JobTime(16384, 300, 2760.0, 25.0),))
    words = plan_text.verdict(replace(FULL, plan=fitting, soaked=None))
    assert words is not None
    assert words.startswith("Fits: 7.4 tok/s")
    assert "a prompt of 16,384 tokens takes 46 min" in words
    lacking = replace(plan, fits=False, shortfalls=(Shortfall("gpu0", 3, 1, "full_context"),), longest_context=89_600)
    refused = plan_text.verdict(replace(FULL, plan=lacking))
    assert refused is not None
    assert "gpu0" in refused
    assert "89,600" in refused
    assert plan_text.verdict(EMPTY) is None
    text = page(replace(FULL, plan=fitting, soaked=None))
    assert (
        text.index('class="verdict')
        < text.index('class="cards"')
        < text.index('id="commands"')
        < text.index('id="machine"')
    )


def test_equal_gpus_share_a_row() -> None:
    eight = find("epyc-7532-8x3090")
    assert [row[0] for row in plan_text.gpu_rows(eight)] == ["gpu0 to gpu7"]
    assert [row[0] for row in plan_text.tier_rows(eight)] == ["gpu0 to gpu7", "dram"]
    mixed = find("epyc-7402p-4x3090")
    assert [row[0] for row in plan_text.gpu_rows(mixed)] == ["gpu0 to gpu3", "gpu4"]


@cache
def on_eight_gpus() -> Plan:
    return make(find("epyc-7532-8x3090"), read("qwen3-235b-a22b:Q4_K_M"), Goal(context=32_768, sequences=4, gpus=None))


def test_equal_gpus_share_a_bar_and_a_column() -> None:
    plan = on_eight_gpus()
    report = build_report(Subject(plan.machine, plan.profile.name, None, plan.profile, plan), Results(), reports.WHEN)
    assert len(report.tiers) == 9
    shared = ["gpu0", "gpu1 to gpu6 (each)", "gpu7", "dram"]  # the first and the last hold more than their layers
    found = Reader(page(report))
    assert [given["data-tier"] for _, given in found.seen if "data-tier" in given] == shared
    assert plan_text.all_tiers_columns(plan_text.folded_tiers(report.tiers))[0] == ["planned", *shared]
    assert [name for name in shared if f"\n### {plain(name)}" in markdown(report)] == shared


def test_unequal_memories_are_not_folded() -> None:
    plan = on_eight_gpus()
    first, second, third, *_ = pictures(plan, None)[1:]
    emptier = replace(second, free_bytes=(second.free_bytes or 0) + 1)
    assert plan_text.folded_tiers([first, emptier, third]) == [first, emptier, third]
    assert [tier.name for tier in plan_text.folded_tiers([first, second, third])] == ["gpu1 to gpu3 (each)"]


def test_cut_answers_are_reported_with_the_command_that_lists_them() -> None:
    assert [row[-1] for row in result_text.reuse_rows(FULL)] == ["not counted", "40 stop, 8 length"]
    command = "tokenmill results batch_2 --cut"
    assert [found for _, found in result_text.cut_answers(FULL)] == [command]
    assert f"<code>{command}</code>" in page(FULL)
    assert f"`{command}`" in markdown(FULL)


def test_every_link_of_the_page_has_its_section() -> None:
    found = Reader(page(FULL))
    ids = {attrs["id"] for _, attrs in found.seen if "id" in attrs}
    assert {(attrs["href"] or "")[1:] for tag, attrs in found.seen if tag == "a"} == ids
    assert ids == {"machine", "plan", "point", "curves", "depth", "reuse", "comparisons", "checks", "commands"}


def test_every_figure_says_where_it_is_from() -> None:
    text = page(FULL)
    for figure in re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL):
        words = Reader(figure).words
        assert "measured" in words or "predicted" in words or "computed" in words, words[:100]
    captions = [Reader(caption).words for caption in re.findall(r"<figcaption>.*?</figcaption>", text)]
    measured = [words for words in captions if "measured on" in words]
    assert measured
    assert all(reports.BUILD in words and "2026-11-15" in words for words in measured if "tokenmill" in words)


def test_figures_are_drawn_with_their_values() -> None:
    found = Reader(page(FULL))
    dots = {(attrs["data-line"], attrs["data-x"], attrs["data-y"]) for _, attrs in found.seen if "data-line" in attrs}
    assert {("decode", "14", "91.2"), ("decode", "32", "19.2"), ("predicted", "8", "92.51")} <= dots
    assert "knee: 14" in found.words
    assert "chosen: 16" in found.words
    assert "at 64: out of memory" in found.words


def test_gaps_are_on_both() -> None:
    bare = build_report(reports.asked(), Results(), reports.WHEN)
    command = f"tokenmill tune {reports.MODEL}"
    (gap,) = (gap for gap in bare.gap("curves") if "threads" in gap.words)
    assert f"{gap.words}: {command}" in Reader(page(bare)).words
    assert f"> {gap.words}: `{command}`" in markdown(bare)


HOSTILE = [
    '<script>alert("1")</script>',
    '"><img src=x onerror=alert(1)>',
    "a|b `c` *d* [e](f) # g\n## h",
    "\u202eevil",
    "]]>--><svg/onload=x>",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_on_the_page(name: str) -> None:
    found = Reader(page(renamed(name, build=name)))
    assert "img" not in {tag for tag, _ in found.seen}
    assert [tag for tag, _ in found.seen].count("script") == 1
    assert not any(key.startswith("on") for _, attrs in found.seen for key in attrs)
    assert name.replace("\u202e", "\\u202e") in found.words


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_in_markdown(name: str) -> None:
    text = markdown(renamed(name))
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert not re.search(r"(?<!\\)[<>|`*\[]", title[2:])
    for block in text.split("\n\n"):
        if block.startswith("| "):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, "a name made a cell"


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=40))
def test_any_name_at_all(name: str) -> None:
    report = renamed(name or "x")
    Reader(page(report)).words.encode("utf-8")
    markdown(report).encode("utf-8")


def test_markdown_has_every_section_and_the_same_figures() -> None:
    text = markdown(FULL)
    for name in (
        "The machine",
        "The plan",
        "The operating point",
        "Threads and sequences",
        "Depth",
        "Batches",
        "Predicted and measured",
        "Soak and quality",
        "The commands",
    ):
        assert f"\n## {name}\n" in text
    assert re.search(r"14 █+▏? +91\.2  ← knee, chosen", text)
    assert "85 % reused" in text
    assert "beyond 16 sequences tok/s falls from 91 to 19" in text
    assert "7,168 of 8,192 tokens" in text


def test_blocks() -> None:
    assert [bar(share, 4) for share in (0, 0.5, 1, 2, 0.28)] == ["", "██", "████", "████", "█▏"]
    assert fenced("a ``` b") == "````\na ``` b\n````"
    assert plain("a_b | c\nd") == "a\\_b \\| c d"


@pytest.mark.parametrize("width", [356, 530])
@pytest.mark.parametrize(
    "dots",
    [
        (Dot(1, 5.0),),
        (Dot(1, 0.0), Dot(2, 0.0)),
        (Dot(1, 1e-9), Dot(512, 1e9)),
        tuple(Dot(float(x), float(x % 7), 0.0, 9.0, 3) for x in range(1, 200)),
    ],
)
def test_odd_curves_are_drawn_inside_their_frame(dots: tuple[Dot, ...], width: int) -> None:
    lines = tuple(Series(f"line {number}", FigureOrigin("measured"), dots) for number in range(5))
    for doubling in (False, True):
        curve = ChartCurve(
            "threads", "t", "threads", "tok/s", lines, doubling=doubling, knee=dots[0].x, chosen=dots[0].x
        )
        text = str(line_chart(curve, width))
        assert "nan" not in text.lower()
        marks = [float(x) for x in re.findall(r'<circle cx="([-\d.]+)"', text)]
        assert marks
        assert all(0 <= x <= width for x in marks)


def test_the_front_shows_what_each_trial_costs() -> None:
    assert FULL.point is not None
    front = front_of(FULL.point)
    assert front is not None
    assert (front.x_name, front.y_name) == ("threads", "decode")
    assert sum(trial.best for trial in front.trials) == 3
    assert [trial.x for trial in front.trials if trial.chosen] == [14.0]
    assert "out of memory" not in str(front_chart(front, 530)), "failed trials are not on it"
    assert front_of(replace(FULL.point, trials=(), front=())) is None


def test_runs_with_the_same_settings_are_one_dot() -> None:
    assert FULL.point is not None
    first = FULL.point.trials[0]
    again = replace(FULL.point, trials=(*FULL.point.trials, first, first))
    assert front_of(again) == front_of(FULL.point)


@pytest.mark.parametrize(
    ("error", "kind", "arrow"), [(0.2, "over", False), (-0.1, "under", False), (3.0, "over", True)]
)
def test_errors_as_bars(error: float, kind: str, arrow: bool) -> None:
    text = str(error_bar(error))
    assert f'class="{kind}"' in text
    assert ("polygon" in text) is arrow
