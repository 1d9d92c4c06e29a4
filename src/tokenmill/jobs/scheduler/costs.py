"""What a job takes of an engine: cells, seconds, and whether computing a head once more is worth a lane.

Works on expected lengths and measured rates; what is not known is None, and each choice says what it falls back on.
"""

from collections.abc import Iterable

from tokenmill.jobs.scheduler.estimates import AnswerLengths, MeasuredRates
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.prefix_tree import PrefixNode
from tokenmill.jobs.scheduler.shape import EngineShape

AGAIN_WITHOUT_RATES = (
    "no rates are measured: a head is computed on one more lane when each lane's share of the answers "
    "is at least as long as the head"
)
AGAIN_UNKNOWN = "a head stays on one lane until the first answer has shown how long answers are"
AGAIN_HOPED = "another lane was tried for want of a measurement: it was taken to write half as much as the first"


class EngineCosts:
    """One engine's costs, as far as finished jobs and measured rates tell. Mutates nothing but by `measured`."""

    def __init__(self, shape: EngineShape, lengths: AnswerLengths) -> None:
        self._lengths = lengths
        self._given = shape.rates
        self._rates = shape.rates

    def measured(self, rates: MeasuredRates) -> None:
        """What the run itself has shown so far; it counts more than what was known before. Mutates."""
        decode = dict(self._given.decode_tok_s) | dict(rates.decode_tok_s)
        self._rates = MeasuredRates(rates.prefill_tok_s or self._given.prefill_tok_s, tuple(sorted(decode.items())))

    def tokens(self, prompt_bytes: float) -> int:
        """Tokens of so much prompt."""
        return int(prompt_bytes * self._lengths.tokens_per_byte)

    def output(self, record: Pending) -> float | None:
        """Tokens of an answer, as expected now."""
        expected = self._lengths.expect(record.head, record.max_tokens)
        return record.output_tokens if expected is None else expected

    def cells(self, prompt_bytes: int, records: Iterable[Pending]) -> int:
        """Cells for so many bytes of prompts and for the answers of some jobs; unknown lengths count nothing."""
        return self.tokens(prompt_bytes) + int(sum(self.output(record) or 0.0 for record in records))

    def seconds(self, record: Pending, lanes: int) -> tuple[float, float] | None:
        """Seconds that a job takes of the engine, and until its answer is complete; None: unknown."""
        rates = self._rates
        output = self.output(record)
        rate = rates.decode_at(lanes) or self._hoped(lanes)
        if not rates.prefill_tok_s or not rate or output is None:
            return None
        prefill_s = self.tokens(record.prompt_bytes) / rates.prefill_tok_s
        return prefill_s + output / rate, prefill_s + output * lanes / rate

    def again_pays(self, node: PrefixNode, again_bytes: int, *, at: int, busy: int) -> tuple[bool, str | None]:
        """Whether a lane more gains a group more than its head costs, and what was assumed for want of knowledge.

        `at` lanes work on the group and `busy` on anything. With rates: what all lanes write more while the new one
        writes its share of the group's answers, as seconds, against the seconds for the head; a width that was never
        tried is hoped for, and measured once it is. Without any: AGAIN_WITHOUT_RATES, which errs towards one lane as
        long as prompts are computed faster than all lanes write.
        """
        mean = self._lengths.mean_tokens
        answers = node.count * mean if mean is not None else (None if node.unknown else node.work)
        if answers is None:
            return False, AGAIN_UNKNOWN
        head = self.tokens(again_bytes)
        rates = self._rates
        now = self._hoped(busy)
        then = self._hoped(busy + 1)
        if not rates.prefill_tok_s or not now or not then:
            return answers / (at + 1) >= head, AGAIN_WITHOUT_RATES
        share_s = answers / (at + 1) * (busy + 1) / then
        pays = share_s * (then - now) / now > head / rates.prefill_tok_s
        return pays, AGAIN_HOPED if pays and busy + 1 > rates.decode_tok_s[-1][0] else None

    def _hoped(self, lanes: int) -> float | None:
        """Tokens a second at a width; one that is beyond all that were measured is reckoned from the nearest.

        Each lane after the first is taken to add half of what one writes alone: between engines that are bound by
        memory, where it adds nearly all, and by arithmetic, where it adds nothing.
        """
        known = self._rates.decode_tok_s
        if not known:
            return None
        if known[0][0] <= lanes <= known[-1][0]:
            return self._rates.decode_at(lanes)
        width, rate = known[0] if lanes < known[0][0] else known[-1]
        return rate * (1 + lanes) / (1 + width)
