"""The forecast against published measurements, within documented tolerances."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from support.public_runs import public
from support.runs import Figure, h200, predicted, seeds
from support.unseen_runs import unseen


def _name(figure: Figure) -> str:
    return f"{figure.case} {figure.kind} {figure.note or figure.depth}"


def _error(figure: Figure) -> float:
    tok_s = predicted(figure)
    assert tok_s is not None, "the machine states enough for this figure"
    return abs(figure.error(tok_s))


def _beyond(figures: Iterable[Figure], decode: float, prefill: float) -> list[str]:
    """Figures whose error exceeds the documented limit, with the error."""
    limits = {"decode": decode, "prefill": prefill}
    errors = [(figure, _error(figure)) for figure in figures]
    assert len(errors) > 20
    return [f"{_name(figure)}: {error:.0%}" for figure, error in errors if error > limits[figure.kind]]


def test_every_seed_is_within_its_tolerance() -> None:
    assert _beyond(seeds(), decode=0.20, prefill=0.40) == []


def test_half_of_the_seeds_decode_within_twelve_percent() -> None:
    errors = [_error(figure) for figure in seeds() if figure.kind == "decode"]
    assert sum(error <= 0.12 for error in errors) >= len(errors) / 2


def test_h200_curves_within_a_quarter() -> None:
    assert _beyond(h200(), decode=0.25, prefill=0.25) == []


def test_h200_cliff_is_there_and_moves_with_the_variable() -> None:
    rows = {(figure.case, figure.sequences): predicted(figure) or 0.0 for figure in h200() if figure.kind == "decode"}
    assert rows["h200-sequences", 32] < rows["h200-sequences", 1] < rows["h200-sequences", 16]
    assert rows["h200-sequences-128", 32] > 3 * rows["h200-sequences", 32]


def test_fourteen_threads_beat_sixteen_on_the_h200_machine() -> None:
    rows = {figure.settings.threads: predicted(figure) or 0.0 for figure in h200() if figure.case == "h200-threads"}
    assert max(rows, key=lambda threads: rows[threads]) == 14


def test_median_of_the_complete_public_runs() -> None:
    decode = [figure for figure in public("A") if figure.kind == "decode"]
    by_case: defaultdict[str, list[float]] = defaultdict(list)
    for figure in decode:
        by_case[figure.case].append(_error(figure))
    assert len(by_case) >= 18
    assert median(error for errors in by_case.values() for error in errors) <= 0.15
    assert median(median(errors) for errors in by_case.values()) <= 0.15


def test_median_of_public_prefill() -> None:
    rows = [(figure, predicted(figure)) for figure in public("A") if figure.kind == "prefill"]
    errors = [abs(figure.error(tok_s)) for figure, tok_s in rows if tok_s is not None]
    assert len(errors) >= 45
    assert median(errors) <= 0.25


def test_runs_that_were_not_fitted() -> None:
    errors = [_error(figure) for figure in unseen()]
    assert median(errors) <= 0.15
    assert sum(error <= 0.20 for error in errors) >= 0.7 * len(errors)
