"""What a benchmark says beside its tables, in sentences: the same on a terminal and in Markdown."""

from collections.abc import Iterator, Sequence

from tokenmill.tuner.bench import Bench
from tokenmill.tuner.bench_cache import CacheEffect
from tokenmill.tuner.bench_energy import Energy, Price
from tokenmill.tuner.bench_rows import Row, Stat
from tokenmill.units import format_bytes


def first_words(rows: Sequence[Row]) -> Iterator[str]:
    """The first request against the steady state."""
    found = {row.what: row for row in rows}
    first = found.get("first")
    cold = found.get("cold")
    if first is None or cold is None or first.total_s is None or cold.total_s is None:
        return
    ratio = first.total_s.median / cold.total_s.median
    yield f"the first request took {ratio:.2f} times what a new prompt takes in steady state"


def cache_words(effect: CacheEffect) -> Iterator[str]:
    """What the prompt cache saves, and how large the state of the prompt is."""
    saved = "an unknown number of" if effect.saved_tokens is None else f"{effect.saved_tokens:,}"
    yield (
        f"prompt cache: {saved} of {effect.prompt_tokens:,} tokens saved; the first token comes after "
        f"{_ms(effect.lookup_s)}, not {_ms(effect.cold_s)}: {effect.times:.1f} times sooner"
    )
    state = []
    if effect.state_bytes is not None:
        state.append(f"{format_bytes(effect.state_bytes)} saved to a file")
    if effect.predicted_state_bytes is not None:
        state.append(f"{format_bytes(effect.predicted_state_bytes)} predicted for its cells")
    if state:
        yield f"state of the prompt: {', '.join(state)}"


def energy_words(energy: Energy, price: Price | None) -> Iterator[str]:
    """Joules of a token, what a million cost, and whose figure it is."""
    if energy.why_not is not None:
        yield f"energy: not readable: {energy.why_not}; --watts takes a wall meter's figure"
        return
    for name, joules in (("written", energy.decode_j), ("of a prompt", energy.prefill_j)):
        if joules is not None:
            cost = "" if price is None else f"; a million cost {_money(price, joules.median)}"
            yield f"energy of a token {name}: {joules.median:.3g} J ±{joules.spread:.0%}{cost}"
    alone = "" if price is None else "; the cost is that of energy alone"
    yield f"from {energy.source}, the whole machine's, idle power included{alone}"


def disturbed_words(bench: Bench) -> str | None:
    """What the star in the tables means; None: there is none."""
    found = list(dict.fromkeys(row.disturbed for row in bench.rows if row.disturbed))
    return f"* disturbed in every run, the last time because {found[-1]}" if found else None


def end_words(bench: Bench) -> Iterator[str]:
    """Runs that were made again, and the notes."""
    again = sum(row.repeated for row in bench.rows)
    if again:
        yield f"{again} disturbed run{'s' if again > 1 else ''} made again"
    yield from (f"note: {note}" for note in bench.notes)


def _ms(value: Stat) -> str:
    return f"{value.median * 1e3:.0f} ms" if value.median < 10 else f"{value.median:.1f} s"


def _money(price: Price, joules: float) -> str:
    return f"{price.of_million(joules):.3g} {price.currency}".rstrip()
