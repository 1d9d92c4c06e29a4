"""Cost of a job on one engine: KV cells, seconds, and whether recomputing a prefix in another slot pays off.

Costs are estimated from expected answer lengths and measured rates; the result is None if they are unknown.
"""

from tokenmill.jobs.scheduler.estimates import AnswerLengths, MeasuredRates
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.prefix_tree import PrefixNode
from tokenmill.jobs.scheduler.shape import EngineShape

RECOMPUTE_WITHOUT_RATES = (
    "no rates have been measured: a prefix is recomputed in another slot if each slot's share of the answers "
    "is at least as long as the prefix"
)
RECOMPUTE_LENGTHS_UNKNOWN = "a prefix stays in one slot until the first answer shows how long answers are"
RECOMPUTE_RATE_ASSUMED = (
    "a prefix was recomputed in another slot although decoding with that many slots has not been measured: "
    "each slot was assumed to add half the decode rate of a single slot"
)


class EngineCosts:
    """Costs of jobs on one engine, estimated from finished jobs and measured rates."""

    def __init__(self, shape: EngineShape, lengths: AnswerLengths) -> None:
        self._lengths = lengths
        self._known_rates = shape.rates
        self._rates = shape.rates

    def measured(self, rates: MeasuredRates) -> None:
        """Update the rates with those measured in this run; they take precedence over the rates known before."""
        decode = dict(self._known_rates.decode_tok_s) | dict(rates.decode_tok_s)
        self._rates = MeasuredRates(
            rates.prefill_tok_s or self._known_rates.prefill_tok_s, tuple(sorted(decode.items()))
        )

    def tokens(self, prompt_bytes: float) -> int:
        """Estimate the tokens of a prompt of this many bytes."""
        return int(prompt_bytes * self._lengths.tokens_per_byte)

    def output(self, record: Pending) -> float | None:
        """Expected output tokens of a job; None if unknown."""
        expected = self._lengths.expect(record.prefix_key, record.max_tokens)
        return record.output_tokens if expected is None else expected

    def seconds(self, record: Pending, slots: int) -> tuple[float, float] | None:
        """Engine seconds that a job takes, and seconds until its answer is complete; None if unknown."""
        rates = self._rates
        output = self.output(record)
        rate = rates.decode_at(slots) or self._estimated_decode(slots)
        if not rates.prefill_tok_s or not rate or output is None:
            return None
        prefill_s = self.tokens(record.prompt_bytes) / rates.prefill_tok_s
        return prefill_s + output / rate, prefill_s + output * slots / rate

    def recompute_pays(self, node: PrefixNode, recompute_bytes: int, *, at: int, busy: int) -> tuple[bool, str | None]:
        """Whether recomputing a group's prefix in one more slot pays off, and the assumption made, if any.

        `at` slots run jobs of the group and `busy` slots run any job. If rates are known, the prefill seconds of the
        prefix are compared with the seconds that the additional decode throughput saves while the new slot decodes its
        share of the group's answers. Rates for slot counts that were never measured are extrapolated. Without rates the
        rule is RECOMPUTE_WITHOUT_RATES, which favours one slot as long as prefill is faster than decode.
        """
        mean = self._lengths.mean_tokens
        answers = node.count * mean if mean is not None else (None if node.unknown else node.work)
        if answers is None:
            return False, RECOMPUTE_LENGTHS_UNKNOWN
        prefix_tokens = self.tokens(recompute_bytes)
        rates = self._rates
        now = self._estimated_decode(busy)
        then = self._estimated_decode(busy + 1)
        if not rates.prefill_tok_s or not now or not then:
            return answers / (at + 1) >= prefix_tokens, RECOMPUTE_WITHOUT_RATES
        share_s = answers / (at + 1) * (busy + 1) / then
        pays = share_s * (then - now) / now > prefix_tokens / rates.prefill_tok_s
        return pays, RECOMPUTE_RATE_ASSUMED if pays and busy + 1 > rates.decode_tok_s[-1][0] else None

    def _estimated_decode(self, slots: int) -> float | None:
        """Decode tokens per second with this many slots, extrapolated from the nearest measurement where necessary.

        The extrapolation assumes that each slot after the first adds half of the rate of a single slot: between a
        memory-bound engine, where it adds nearly all of it, and a compute-bound one, where it adds nothing.
        """
        known = self._rates.decode_tok_s
        if not known:
            return None
        if known[0][0] <= slots <= known[-1][0]:
            return self._rates.decode_at(slots)
        width, rate = known[0] if slots < known[0][0] else known[-1]
        return rate * (1 + slots) / (1 + width)
