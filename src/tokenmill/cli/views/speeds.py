"""The speeds behind an estimate of `--dry-run`, as text and as JSON."""

from typing import Any

from tokenmill.api.engines.speeds import EngineSpeeds
from tokenmill.units import format_tok_s, number_of


def speed_words(speeds: EngineSpeeds) -> str:
    """Prefill and decode speed with the number of sequences, and where they come from."""
    decode = speeds.rates.decode_at(speeds.width)
    rates = [
        f"{what} {format_tok_s(rate)} tok/s"
        for rate, what in ((speeds.rates.prefill_tok_s, "prefill"), (decode, "decode"))
        if rate is not None
    ]
    return f"{', '.join(rates)} with {number_of(speeds.width, 'sequence')}; {speeds.source}"


def speed_document(speeds: EngineSpeeds | None) -> dict[str, Any] | None:
    """The JSON form; None if the speeds are unknown."""
    if speeds is None:
        return None
    return {
        "measured": speeds.measured,
        "confidence": speeds.confidence,
        "words": speeds.source,
        "prefill_tok_s": speeds.rates.prefill_tok_s,
        "decode_tok_s": speeds.rates.decode_at(speeds.width),
        "sequences": speeds.width,
    }
