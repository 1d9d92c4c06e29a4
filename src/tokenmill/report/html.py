"""The report as one HTML page: no network, no script, every text escaped. Pure.

The page's own policy forbids whatever it does not need, so nothing can be fetched even from what a model file says of
itself. Each chart is drawn twice, for a wide and for a slim page; the style sheet shows one of them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files

from tokenmill.report import facts
from tokenmill.report.bars import NAMES, reuse_chart, swatch, tier_chart
from tokenmill.report.figures import error_bar, front_chart
from tokenmill.report.front import front_of
from tokenmill.report.parts import WIDE, both, dated, figure, lacking, listed, origin, table
from tokenmill.report.report import Comparison, Report, TierPicture
from tokenmill.report.svg import Markup, figure_text, joined, tag
from tokenmill.report.tiers import SHOWN
from tokenmill.units import format_bytes, format_gb_s

BROAD = 660  # px of the charts of memories and of reuse
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
GENERATOR = "tokenmill report"  # what tells a file of ours from another's
_MOST_ROWS = 14  # of a table before the rest is folded away


def page(report: Report) -> str:
    """The whole page."""
    title = _title(report)
    style = files("tokenmill.report").joinpath("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=GENERATOR),
        tag("title", title),
        tag("style", Markup(style)),
    )
    sections = [_section(*each) for each in _sections(report) if each[2]]
    links = [tag("a", name, href=f"#{key}") for key, name, content in _sections(report) if content]
    body = tag(
        "body",
        tag("header", tag("h1", title), _subtitle(report), tag("nav", *links), _cards(report), class_="top"),
        tag("main", *sections),
        _footer(report),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _title(report: Report) -> str:
    return f"{report.model.name} on {report.machine.name}" if report.model else report.machine.name


def _sections(report: Report) -> list[tuple[str, str, list[Markup]]]:
    makers: tuple[tuple[str, str, Callable[[Report], Iterator[Markup]]], ...] = (
        ("machine", "The machine", _machine),
        ("plan", "The plan", _plan),
        ("point", "The operating point", _point),
        ("curves", "Threads and sequences", _curves),
        ("depth", "Depth", _depth),
        ("reuse", "Reuse", _reuse),
        ("comparisons", "Predicted against measured", _comparisons),
        ("checks", "Soak and quality", _checks),
        ("commands", "The commands", _commands),
    )
    return [(key, name, list(make(report))) for key, name, make in makers]


def _section(key: str, name: str, content: Sequence[Markup]) -> Markup:
    return tag("section", tag("h2", name), *content, id=key)


def _subtitle(report: Report) -> Markup:
    model = report.model
    parts = [model.quantisation, format_bytes(model.bytes)] if model else ["what this machine is, and what ran on it"]
    if model and model.ghost:
        parts.append("a ghost: sizes are real, weights are not there")
    return tag("p", ", ".join(part for part in parts if part), class_="soft")


def _footer(report: Report) -> Markup:
    when = report.made[:16].replace("T", " ")
    return tag("footer", dated(f"Made {when} UTC by tokenmill {report.version}. {facts.UNITS}"))


def _cards(report: Report) -> Markup | None:
    cards = [
        tag(
            "div",
            tag("span", name),
            tag("strong", figure, class_=figure if figure in ("yes", "no") else None),
            tag("small", dated(words)),
        )
        for name, figure, words in facts.headline(report)
    ]
    return tag("div", *cards, class_="cards") if cards else None


def _machine(report: Report) -> Iterator[Markup]:
    machine = report.machine
    left = [listed(facts.machine_rows(machine))]
    right = [tag("h3", "Memories")]
    if machine.gpus:
        names = ("card", "name", "memory", "nominal", "PCIe", "limit")
        left += [tag("h3", "GPUs"), table(names, facts.gpu_rows(machine), numbers=(2, 3, 4, 5))]
    if links := facts.link_rows(machine):
        left += [tag("h3", "Links"), table(("between", "link", "nominal", "measured"), links, numbers=(2, 3))]
    head = ("memory", "kind", "size", "free", "nominal", "measured")
    right += [table(head, facts.tier_rows(machine), numbers=(2, 3, 4, 5)), joined(_when(report))]
    right += [figure(curve) for curve in report.bandwidth]
    yield tag("div", tag("div", *left), tag("div", *right), class_="two")
    yield from lacking(report.gap("machine"))


def _when(report: Report) -> Markup | None:
    measured = report.machine.measured
    if measured is None:
        return None
    return origin(f"bandwidth measured on {report.machine.name}, {measured.when[:10]}")


def _plan(report: Report) -> Iterator[Markup]:
    yield from lacking(report.gap("plan"))
    plan = report.plan
    if plan is None or report.model is None:
        return
    yield origin("Predicted before anything is loaded: sizes as the engine computes them, speeds as forecasts.")
    for lack in plan.shortfalls:
        when = "while loading" if lack.moment == "load_peak" else "at full context"
        yield tag("p", f"{lack.tier} lacks {format_bytes(lack.missing_bytes)} {when}.", class_="gap lack")
    if plan.changes:
        yield tag("ul", *(tag("li", f"would fit with {change.what}: {change.effect}") for change in plan.changes))
    yield tag(
        "div",
        tag("div", tag("h3", "Model"), listed(facts.model_rows(report.model))),
        tag("div", tag("h3", "Settings"), listed(facts.plan_rows(plan))),
        class_="two",
    )
    yield from _tiers(report)
    for words in (*plan.warnings, *plan.notes):
        yield tag("p", words, class_="gap")
    if plan.decisions:
        rows = [(decision.name, decision.value, decision.reason) for decision in plan.decisions]
        yield tag("details", tag("summary", "every choice and its reason"), table(("choice", "value", "reason"), rows))


def _tiers(report: Report) -> Iterator[Markup]:
    if any(tier.loaded for tier in report.tiers):
        for tier in report.tiers:
            yield tag("div", _tier(tier), _tier_table(tier), class_="split")
    elif report.tiers:
        few = len(report.tiers) < 4
        pictures = [_tier(tier, BROAD if few else WIDE) for tier in report.tiers]
        yield tag(
            "div",
            tag("div", *pictures, class_=None if few else "two"),
            _all_tiers(report.tiers),
            class_="split" if few else None,
        )
    yield from lacking(report.gap("tiers"))


def _tier(tier: TierPicture, width: int = BROAD) -> Markup:
    rate = "" if tier.measured_gb_s is None else f", {format_gb_s(tier.measured_gb_s)} measured"
    nominal = "" if tier.nominal_gb_s is None else f", {format_gb_s(tier.nominal_gb_s)} nominal"
    loaded = tier.loaded
    caption = f"last load ({loaded.settings}): {loaded.origin.words}" if loaded else None
    return tag(
        "figure",
        tag("h3", f"{tier.name}{nominal}{rate}"),
        both(partial(tier_chart, tier), width),
        tag("figcaption", dated(caption)) if caption else None,
        data_tier=tier.name,
        class_="tier",
    )


def _all_tiers(tiers: Sequence[TierPicture]) -> Markup:
    """Items down, memories across."""
    columns = [facts.planned_sizes(tier) for tier in tiers]
    rows = [_items_row(item, columns) for item in SHOWN if any(item in sizes for sizes in columns)]
    rows.append(["loading peak", *(format_bytes(tier.loading_bytes) for tier in tiers)])
    return table(("planned", *(tier.name for tier in tiers)), rows, range(1, len(tiers) + 1), kind="items")


def _items_row(item: str, columns: Sequence[dict[str, int]]) -> list[object]:
    sizes = (format_bytes(sizes[item]) if item in sizes else "" for sizes in columns)
    return [joined(swatch(item), NAMES[item]), *sizes]


def _tier_table(tier: TierPicture) -> Markup:
    """Items down; the plan, and the last load predicted and measured."""
    loads = (tier.loaded.predicted, tier.loaded.measured) if tier.loaded else ()
    columns = [facts.planned_sizes(tier), *({part.item: part.bytes for part in parts} for parts in loads)]
    rows = [_items_row(item, columns) for item in SHOWN if any(item in sizes for sizes in columns)]
    rows.append(["loading peak", format_bytes(tier.loading_bytes), *("" for _ in loads)])
    heads = ("item", "planned", *(("predicted", "measured") if loads else ()))
    return table(heads, rows, range(1, len(heads)), kind="items")


def _point(report: Report) -> Iterator[Markup]:
    point = report.point
    if point is not None:
        yield origin(facts.point_words(point))
        yield tag("p", point.knee, class_="gap knee-says")
        given = [tag("ul", *(tag("li", each) for each in point.given_up))] if point.given_up else []
        given_head = tag("h3", "Given up") if given else None
        left = tag(
            "div",
            tag("h3", "Settings"),
            listed(facts.dial_rows(point.dials)),
            tag("h3", "Measured there"),
            listed(facts.figure_rows(point.figures)),
            given_head,
            *given,
        )
        front = front_of(point)
        right = (
            []
            if front is None
            else [
                tag(
                    "figure",
                    tag("h3", f"{front.y_name.capitalize()} against {front.x_name}"),
                    both(partial(front_chart, front), WIDE),
                    tag("figcaption", "measured; filled: nothing else is better in everything (the Pareto front)"),
                    data_curve="front",
                )
            ]
        )
        yield tag("div", left, *right, class_="two")
        rows = table(facts.FRONT_HEAD, facts.front_rows(point), numbers=tuple(range(7)))
        yield tag("details", tag("summary", "the Pareto front as a table"), rows)
    yield from lacking(report.gap("point"))


def _curves(report: Report) -> Iterator[Markup]:
    if report.curves:
        if any(curve.knee is not None for curve in report.curves):
            yield origin("The knee is where more stops paying: before the steepest fall, or where little is added.")
        yield tag("div", *(figure(curve) for curve in report.curves), class_="two")
    yield from lacking(report.gap("curves"))


def _depth(report: Report) -> Iterator[Markup]:
    if report.depth:
        yield tag("div", *(figure(curve) for curve in report.depth), class_="two")
    yield from lacking(report.gap("depth"))


def _reuse(report: Report) -> Iterator[Markup]:
    if report.reuse:
        yield origin("Prompt tokens of past batches, measured by the engines' own counters.")
        legend = tag("figcaption", swatch("computed"), "computed ", swatch("reused"), "reused from before")
        chart = tag("figure", both(partial(reuse_chart, report.reuse), BROAD), legend, data_curve="reuse")
        rows = [
            (
                batch.source,
                f"{batch.jobs:,}",
                f"{batch.answers:,}",
                f"{batch.answers_reused:,}",
                f"{batch.written_tokens:,}",
            )
            for batch in report.reuse
        ]
        head = ("batch", "jobs", "answers computed", "answers reused", "tokens written")
        yield tag("div", chart, table(head, rows, numbers=(1, 2, 3, 4)), class_="split")
    yield from lacking(report.gap("reuse"))


def _comparisons(report: Report) -> Iterator[Markup]:
    sizes = [each for each in report.comparisons if each.unit == "bytes"]
    if report.comparisons:
        yield origin("An error above 0: predicted too much. Bars reach to 50 %.")
    if sizes:
        yield tag("h3", "Sizes after the last load")
        yield from _compared(sizes)
    if speeds := facts.speeds_of(report.comparisons):
        yield tag("h3", "Speeds")
        yield from _compared(speeds)
    yield from lacking(report.gap("comparisons"))


def _compared(found: Sequence[Comparison]) -> Iterator[Markup]:
    """One table; what is the same in all rows, settings and origin, stands above it."""
    origins = {each.origin.words for each in found}
    same = facts.shared_words([each.at for each in found])
    above = [*(origins if len(origins) == 1 else ()), *([f"at {same}"] if same else ())]
    if above:
        yield origin("; ".join(above))
    head = ("what", "predicted", "measured", "error", "", *(() if len(origins) == 1 else ("measured",)))
    rows = [_comparison(each, same, source=len(origins) > 1) for each in found]
    yield table(head, rows[:_MOST_ROWS], numbers=(1, 2, 3), kind="compared")
    if len(rows) > _MOST_ROWS:
        rest = table(head, rows[_MOST_ROWS:], numbers=(1, 2, 3), kind="compared")
        yield tag("details", tag("summary", f"{len(rows) - _MOST_ROWS} more"), rest)


def _comparison(each: Comparison, same: str, *, source: bool) -> list[object]:
    small = [tag("small", words) for words in (facts.without(each.at, same), each.why) if words]
    row: list[object] = [
        joined(each.what, *small),
        facts.amount(each.predicted, each.unit),
        facts.amount(each.measured, each.unit),
        facts.error_text(each.error),
        error_bar(each.error) if each.error is not None else "",
    ]
    return [*row, dated(each.origin.words.removeprefix("measured on "))] if source else row


def _checks(report: Report) -> Iterator[Markup]:
    soaked = report.soaked
    qualified = report.qualified
    if soaked is not None:
        of = f" of {soaked.goal_context:,}" if soaked.goal_context else ""
        usable = "unknown" if soaked.usable_context is None else f"{soaked.usable_context:,}{of} tokens"
        yield joined(tag("h3", f"Usable context: {usable}"), tag("p", soaked.reason), origin(soaked.origin.words))
        yield tag("div", *(figure(curve) for curve in soaked.curves), class_="two")
    yield from lacking(report.gap("soaked"))
    if qualified is not None:
        verdicts = {
            True: tag("span", "good", class_="yes"),
            False: tag("span", "not good enough", class_="no"),
            None: Markup("reported"),
        }
        rows = [
            [
                check.name,
                "" if check.score is None else figure_text(check.score),
                "" if check.threshold is None else figure_text(check.threshold),
                verdicts[check.good],
                check.words or "",
            ]
            for check in qualified.checks
        ]
        yield joined(
            tag("h3", "Is the quant good enough?"),
            tag("p", qualified.verdict) if qualified.verdict else None,
            origin(qualified.origin.words),
            table(("check", "score", "needed", "", "what was seen"), rows, numbers=(1, 2)),
        )
    yield from lacking(report.gap("qualified"))


def _commands(report: Report) -> Iterator[Markup]:
    for command in report.commands:
        notes = [tag("p", note, class_="origin") for note in command.notes]
        yield joined(tag("h3", command.what), tag("pre", command.text), *notes)
