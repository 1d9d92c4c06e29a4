"""The recipe `expand`: grows a dataset from examples.

Each round writes new examples, drops invalid ones and near-duplicates of seeds or earlier ones, has the same model
judge the rest, and keeps those above the threshold. The result depends only on seeds, options and answers, so a
resumed run makes the same batches and finds their answers. Rows with a low score stay in the comparison, because
their near-duplicates would get the same score.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tokenmill.recipes.expansion.answers import CUT, Dropped, compared, example_of, judge_line, verdict_of
from tokenmill.recipes.expansion.lines import MIN_PART, ExpansionJob, jobs_of, part_lines
from tokenmill.recipes.expansion.near_duplicates import NearDuplicates, SimilarText
from tokenmill.recipes.expansion.prompts import PromptFile
from tokenmill.recipes.expansion.request import Expanded, ExpandRequest, LineTally
from tokenmill.recipes.expansion.rows import NewExample, Rejected, existing_rows, write_expanded, write_rejected
from tokenmill.recipes.expansion.seeds import Parent
from tokenmill.recipes.expansion.transforms import INSTRUCTION
from tokenmill.recipes.runner import Answered, BatchRunner, Line, RecipeEnd, origin_of_answer
from tokenmill.units import number_of

_MORE = "use more seeds, more --ways or a higher --temperature"


async def expand(runner: BatchRunner, request: ExpandRequest, tell: Callable[[str], None]) -> Expanded:
    """Grow the dataset and write it; `tell` logs a message per part of a round.

    An interrupted run keeps an earlier table that has more rows, with its rejects.
    """
    expansion = _Expansion(request, runner)
    end, why = await expansion.run(tell)
    prompts = request.prompts
    rows = len(expansion.kept) + (len(request.seeds.parents) if request.keep_seeds else 0)
    existing = 0 if end == "finished" else existing_rows(request.output)
    replaced = existing <= rows
    if replaced:
        write_expanded(request.output, request.seeds, expansion.kept, prompts, keep_seeds=request.keep_seeds)
    if request.rejected is not None and (replaced or not request.rejected.exists()):
        write_rejected(request.rejected, request.seeds, expansion.rejected, prompts)
    return Expanded(
        request.output,
        max(rows, existing),
        len(expansion.kept),
        expansion.ways,
        expansion.round,
        end,
        why,
        expansion.waiting,
        expansion.surplus,
        expansion.cut,
        dict(expansion.failures.most_common()),
        replaced,
    )


class _Expansion:
    """One run of the recipe."""

    def __init__(self, request: ExpandRequest, runner: BatchRunner) -> None:
        self._request = request
        self._runner = runner
        self.kept: list[NewExample] = []
        self.rejected: list[Rejected] = []
        self.ways = {variant.label: LineTally() for variant in request.variants}
        self.failures: Counter[str] = Counter()
        self.round = self.waiting = self.surplus = self.cut = 0
        self._stage = self._submitted = self._answered = 0
        self._last_check = (0, 0, 0)  # rounds, lines and rows at the last check of the yield
        self._texts = NearDuplicates(request.near)
        self._tasks = (
            NearDuplicates(request.near) if any(variant.way == INSTRUCTION for variant in request.variants) else None
        )
        for parent in request.seeds.parents:
            self._remember(parent)

    async def run(self, tell: Callable[[str], None]) -> tuple[RecipeEnd, str]:
        """Run rounds until one ends the recipe; return how and why."""
        request = self._request
        parents: tuple[Parent, ...] = request.seeds.parents
        while self.round < request.max_rounds:
            before = 0 if request.evolve else self.round
            jobs = list(jobs_of(parents, request.variants, request.per_seed, before))
            if not jobs:
                why = f"the last round kept no new rows{self._missed_target()}"
                return "finished", why if self.round else "no way applies to any seed"
            self.round += 1
            kept = len(self.kept)
            end = await self._work_round(jobs, tell)
            if end != "finished":
                return end, _ENDS[end]
            if request.target is not None and len(self.kept) >= request.target:
                return "finished", "the target is reached"
            if self.round < request.max_rounds and (low_yield := self._low_yield()) is not None:
                return "finished", low_yield
            if request.evolve:
                parents = tuple(made.parent for made in self.kept[kept:])
        done = number_of(self.round, "round")
        short = "" if request.target is None else f" and did not reach the target of {request.target:,}"
        return "finished", f"{done} finished{short}"

    def _low_yield(self) -> str | None:
        """Why no further round is worthwhile; None: it is, or too few lines were written to tell."""
        rounds, submitted, rows = self._last_check
        minimum = self._request.least_yield
        lines = self._submitted - submitted
        new = len(self.kept) - rows
        if lines < MIN_PART:
            return None
        self._last_check = (self.round, self._submitted, len(self.kept))
        if new >= minimum * lines:
            return None
        which = f"round {self.round}" if rounds + 1 == self.round else f"rounds {rounds + 1} to {self.round}"
        kept = f"{number_of(new, 'new row')} of {number_of(lines, 'line')}"
        return f"{which} kept {kept}, less than {minimum:.0%}{self._missed_target()}"

    def _missed_target(self) -> str:
        """A clause with advice if the target was missed; empty without a target."""
        target = self._request.target
        return "" if target is None else f"; the target of {target:,} was not reached: {_MORE}"

    async def _work_round(self, jobs: list[ExpansionJob], tell: Callable[[str], None]) -> RecipeEnd:
        """Run the jobs of a round in parts, until the target is reached."""
        at = 0
        end: RecipeEnd = "finished"
        while at < len(jobs) and not self._target_reached():
            part = jobs[at : at + self._part(len(jobs) - at)]
            at += len(part)
            self._stage += 1
            kept = len(self.kept)
            end = await self._work_part(part)
            tell(
                f"round {self.round}: {len(self.kept) - kept:,} of {number_of(len(part), 'line')} kept, "
                f"{len(self.kept):,}{'' if self._request.target is None else f' of {self._request.target:,}'} in total"
            )
            if end != "finished":
                break
        return end

    def _target_reached(self) -> bool:
        return self._request.target is not None and len(self.kept) >= self._request.target

    def _part(self, left: int) -> int:
        """Number of lines to write next."""
        return left if self._request.target is None else part_lines(self._submitted, left)

    async def _work_part(self, jobs: list[ExpansionJob]) -> RecipeEnd:
        """Run a part: write, compare, judge, keep."""
        request = self._request
        named = dict[str, ExpansionJob]()

        def lines() -> Iterator[Line]:
            for job in jobs:  # a generator: a round may have millions of jobs
                line = request.prompts.line(job)
                named[str(line["custom_id"])] = job
                yield line

        self._submitted += len(jobs)
        ran = await self._runner.run(f"write {self._stage}", lines())
        self._answered = 0
        new = list(self._new(ran.answers(), named))
        self.waiting += len(jobs) - self._answered
        if request.judge is None:
            for made in new:
                self._keep(made)
            return ran.end
        if ran.end != "finished":
            self.waiting += len(new)
            return ran.end
        return await self._judge(new, request.judge) if new else "finished"

    def _new(self, answers: Iterator[Answered], jobs: Mapping[str, ExpansionJob]) -> Iterator[NewExample]:
        """Valid, non-duplicate examples; the others are counted."""
        request = self._request
        here = self._runner.origin
        for answer in answers:
            self._answered += 1
            job = jobs[answer.custom_id]
            self.ways[job.variant.label].made += 1
            example = example_of(answer, job, request.seeds.shape, request.prompts.schema)
            origin = origin_of_answer(answer, here)
            if isinstance(example, Dropped):
                if example.why == "failed":
                    self.failures[example.reason] += 1
                self.cut += example.reason == CUT
                self._drop(Rejected(answer.custom_id, job, self.round, example, None, origin))
                continue
            made = NewExample(answer.custom_id, job, self.round, example, origin)
            similar = self._similar(made)
            if similar is not None:
                reason = f"similarity {similar.similarity:.2f} to {similar.name}"
                self._drop(made.dropped(Dropped("near-duplicate", reason)))
                continue
            self._remember(made.parent)
            yield made

    async def _judge(self, new: list[NewExample], prompt: PromptFile) -> RecipeEnd:
        request = self._request
        shape = self._request.seeds.shape
        by_name = dict[str, NewExample]()

        def lines() -> Iterator[Line]:
            for made in new:
                old = made.job.parent.example
                variant = made.job.variant
                line = judge_line(made.id, made.example, old, variant, prompt, shape)
                by_name[str(line["custom_id"])] = made
                yield line

        ran = await self._runner.run(f"judge {self._stage}", lines())
        seen = 0
        for answer in ran.answers():
            seen += 1
            made = by_name[answer.custom_id]
            verdict = verdict_of(answer)
            if verdict is None:
                reason = f"judge: {answer.message or answer.code or 'the answer has no score'}"
                self.failures[reason] += 1
                self._drop(made.dropped(Dropped("failed", reason)))
            elif verdict.score < request.least_score:
                reason = f"{verdict.score}{'' if verdict.reason is None else f': {verdict.reason}'}"
                self._drop(made.dropped(Dropped("too low", reason)))
            else:
                self._keep(replace(made, score=verdict.score))
        self.waiting += len(new) - seen
        return ran.end

    def _keep(self, made: NewExample) -> None:
        if self._target_reached():
            self.surplus += 1
            return
        self.kept.append(made)
        self.ways[made.job.variant.label].kept += 1

    def _drop(self, rejected: Rejected) -> None:
        self.ways[rejected.job.variant.label].dropped[rejected.dropped.why] += 1
        if self._request.rejected is not None:
            self.rejected.append(rejected)

    def _similar(self, made: NewExample) -> SimilarText | None:
        """An earlier near-duplicate of a new example; for the way `instruction` only the tasks are compared."""
        if made.job.variant.way == INSTRUCTION and self._tasks is not None:
            return self._tasks.find(compared(made.example, task_alone=True))
        return self._texts.find(compared(made.example, task_alone=False))

    def _remember(self, parent: Parent) -> None:
        self._texts.add(parent.id, compared(parent.example, task_alone=False))
        task = compared(parent.example, task_alone=True)
        if self._tasks is not None and task:
            self._tasks.add(parent.id, task)


_ENDS: Mapping[RecipeEnd, str] = {
    "tokens": "the token limit of this run is reached; the same command resumes",
    "hours": "the time limit of this run is reached; the same command resumes",
    "stopped": "stopped; the same command resumes",
    "cancelled": "the batch was cancelled",
}
