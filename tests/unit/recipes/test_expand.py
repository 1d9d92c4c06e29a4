"""The recipe with a scripted runner: kept and dropped rows, ends, resumed runs."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.answers import CUT
from tokenmill.recipes.expansion.forecast import ASSUMED_YIELD, prospect_of
from tokenmill.recipes.expansion.lines import ExpandPrompts, SamplingOptions
from tokenmill.recipes.expansion.prompts import JUDGE, load_prompt
from tokenmill.recipes.expansion.recipe import expand
from tokenmill.recipes.expansion.request import Expanded, ExpandRequest, expand_summary
from tokenmill.recipes.expansion.rows import PROVENANCE, check_targets
from tokenmill.recipes.expansion.seeds import Seeds, read_seeds
from tokenmill.recipes.expansion.transforms import INSTRUCTION, WAYS, Variant
from tokenmill.recipes.runner import Answered, AnswerOrigin, Line, RecipeCost, RecipeEnd
from tokenmill.storage.rows import read_rows

ORIGIN = AnswerOrigin("scripted", "id-of-its-bytes", "native", "build 7", 1024)
PARAPHRASE, HARDER = Variant("paraphrase"), Variant("harder")
WORDS = (
    "mill",
    "wheel",
    "stone",
    "grain",
    "flour",
    "river",
    "sack",
    "bread",
    "dough",
    "oven",
    "baker",
    "cart",
    "road",
)


def drawn(text: str, count: int = 12) -> str:
    """Deterministic random words for a name."""
    digest = sha256(text.encode()).digest()
    return " ".join(f"{WORDS[byte % len(WORDS)]}{byte}" for byte in digest[:count])


Script = Callable[[Mapping[str, Any]], str | Answered]


def written(line: Line) -> str:
    """A different example for every line; scores of 4."""
    if line["custom_id"].startswith("judge-"):
        return '{"score": 4, "reason": "fine"}'
    text = drawn(line["custom_id"])
    return json.dumps({"instruction": text, "output": f"Answer {text}"}) if "response_format" in line["body"] else text


@dataclass(frozen=True)
class Stage:
    end: RecipeEnd
    total: int
    outcomes: tuple[Answered, ...]

    def answers(self) -> Iterator[Answered]:
        return iter(self.outcomes)


class Scripted:
    """A runner that keeps its answers; at most `most` further answers are computed."""

    def __init__(self, script: Script = written, *, most: int | None = None, memory: dict[str, Answered] | None = None):
        self._script, self._left = script, most
        self.memory = {} if memory is None else memory
        self.stages: list[tuple[str, int]] = []
        self.computed = 0

    @property
    def origin(self) -> AnswerOrigin:
        return ORIGIN

    @property
    def spent(self) -> RecipeCost:
        return RecipeCost(answers=self.computed)

    async def run(self, stage: str, lines: Iterable[Line]) -> Stage:
        given = [json.loads(json.dumps(line)) for line in lines]
        names = [line["custom_id"] for line in given]
        assert len(set(names)) == len(names)
        self.stages.append((stage, len(given)))
        outcomes = []
        for line in given:
            name = line["custom_id"]
            if name not in self.memory and self._left != 0:
                self._left = None if self._left is None else self._left - 1
                self.computed += 1
                self.memory[name] = self._answered(line)
            if name in self.memory:
                outcomes.append(self.memory[name])
        return Stage("finished" if len(outcomes) == len(given) else "tokens", len(given), tuple(outcomes))

    def _answered(self, line: Line) -> Answered:
        said = self._script(line)
        if isinstance(said, Answered):
            return said._replace(custom_id=line["custom_id"])
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return Answered(line["custom_id"], {"choices": [choice]})


def seeds(folder: Path, count: int = 6, **row: Any) -> Seeds:
    path = folder / "seeds.jsonl"
    rows = [
        {"instruction": f"Task {n} {drawn(str(n))}", "output": f"Done {drawn(f'o{n}')}"} | row for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_seeds(path)


def order(
    folder: Path, *variants: Variant, judge: bool = False, found: Seeds | None = None, **how: Any
) -> ExpandRequest:
    found = found or seeds(folder)
    if Variant(INSTRUCTION) in variants:
        found = replace(found, shape=found.shape.with_task())
    desk = ExpandPrompts(
        found.shape, {way: load_prompt(way) for way in WAYS}, SamplingOptions(max_tokens=99), how.pop("schema", None)
    )
    asked = variants or (PARAPHRASE, HARDER)
    how.setdefault("output", folder / "out.jsonl")
    return ExpandRequest(found, desk, asked, judge=load_prompt(JUDGE) if judge else None, **how)


def grow(runner: Scripted, what: ExpandRequest) -> Expanded:
    said: list[str] = []
    done = asyncio.run(expand(runner, what, said.append))
    assert len(said) == sum(stage.startswith("write") for stage, _ in runner.stages)
    return done


def test_one_round_makes_every_variant_of_every_seed(tmp_path: Path) -> None:
    what, runner = order(tmp_path, judge=True), Scripted()
    done = grow(runner, what)
    assert runner.stages == [("write 1", 12), ("judge 1", 12)]
    rows = list(read_rows(what.output))
    assert (done.rows, done.kept, len(rows), done.end, done.rounds) == (12, 12, 12, "finished", 1)
    assert list(rows[0]) == ["instruction", "output", *PROVENANCE]
    for row in rows:
        assert row["parent"] == row["root"]
        assert (row["depth"], row["round"], row["score"], row["detail"]) == (1, 1, 4, None)
        assert row["prompt_file"] == f"{row['way']}.md"
        assert row["prompt_sha256"] == load_prompt(row["way"]).sha256
        assert [row[key] for key in ("model", "model_id", "engine", "build")] == [
            "scripted",
            "id-of-its-bytes",
            "native",
            "build 7",
        ]
        assert (row["temperature"], row["top_p"], row["max_tokens"]) == (0.8, 0.95, 99)
        assert row["instruction"] == drawn(row["id"])
    assert {(row["parent"], row["way"]) for row in rows} == {
        (f"seed-{n}", way) for n in range(1, 7) for way in ("paraphrase", "harder")
    }
    assert len({row["seed"] for row in rows}) == 12


def test_interrupted_runs_give_the_same_output(tmp_path: Path) -> None:
    """A run stopped after every third answer gives the same bytes and computes as much as an uninterrupted one."""
    whole = order(tmp_path, judge=True, target=40, output=tmp_path / "whole.jsonl")
    undisturbed = Scripted()
    grow(undisturbed, whole)
    memory: dict[str, Answered] = {}
    pieces = replace(whole, output=tmp_path / "pieces.jsonl")
    computed, before = 0, -1
    while True:
        runner = Scripted(most=3, memory=memory)
        done = grow(runner, pieces)
        computed += runner.computed
        assert done.kept >= before  # existing rows are kept
        before = done.kept
        if done.end == "finished":
            break
        assert done.waiting > 0
        assert done.why
    assert computed == undisturbed.computed
    assert pieces.output.read_bytes() == whole.output.read_bytes()
    assert done.kept == 40


def test_a_stopped_round_without_judge_keeps_its_rows(tmp_path: Path) -> None:
    done = grow(Scripted(most=5), order(tmp_path))
    assert (done.kept, done.rows, done.waiting, done.end) == (5, 5, 7, "tokens")


def test_dropped_lines_are_counted_and_reported(tmp_path: Path) -> None:
    found = seeds(tmp_path)
    seed = found.parents[2].example

    def script(line: Mapping[str, Any]) -> str | Answered:
        user = line["body"]["messages"][-1]["content"]
        if line["custom_id"].startswith("judge-"):
            return '{"score": 2, "reason": "dull"}' if "Task 5" in user else written(line)
        if "Task 0" in user:
            return Answered("", None, "too_long", "the prompt is too long")
        if "Task 1" in user:
            return '{"instruction": "x"}'
        if "Task 2" in user:
            return json.dumps({"instruction": seed.task.upper(), "output": seed.answer})
        if "Task 3" in user:
            choice = {"message": {"content": written(line)}, "finish_reason": "length"}
            return Answered("", {"choices": [choice]})
        return written(line)

    what = order(tmp_path, PARAPHRASE, judge=True, found=found, rejected=tmp_path / "rejected.jsonl")
    done = grow(Scripted(script), what)
    assert done.kept == 1
    assert done.total.dropped == {"failed": 1, "invalid": 2, "near-duplicate": 1, "too low": 1}
    assert done.failures == {"the prompt is too long": 1}
    assert done.cut == 1
    rejected = list(read_rows(tmp_path / "rejected.jsonl"))
    assert [(row["parent"], row["why"], row["reason"]) for row in rejected] == [
        ("seed-1", "failed", "the prompt is too long"),
        ("seed-2", "invalid", "answer: 'output' is a required property"),
        ("seed-3", "near-duplicate", "similarity 1.00 to seed-3"),
        ("seed-4", "invalid", CUT),
        ("seed-6", "too low", "2: dull"),
    ]
    assert rejected[2]["instruction"] == seed.task.upper()
    assert rejected[0]["instruction"] is None
    document = expand_summary(done)
    counts = ("made", "kept", "near_duplicates", "invalid", "judged_too_low", "failed")
    assert [document[key] for key in counts] == [6, 1, 1, 2, 1, 1]
    assert document["ways"]["paraphrase"]["made"] == 6


def test_an_unreadable_score_drops_the_row(tmp_path: Path) -> None:
    def script(line: Mapping[str, Any]) -> str:
        return "splendid" if line["custom_id"].startswith("judge-") else written(line)

    done = grow(Scripted(script), order(tmp_path, PARAPHRASE, judge=True))
    assert done.total.dropped == {"failed": 6}
    assert list(done.failures.values()) == [6]


def test_new_rows_are_compared_with_each_other(tmp_path: Path) -> None:
    same = json.dumps({"instruction": drawn("same"), "output": drawn("too")})
    done = grow(Scripted(lambda _line: same), order(tmp_path))
    assert (done.kept, done.total.dropped["near-duplicate"]) == (1, 11)


@pytest.mark.parametrize("target", [1, 12, 13, 100])
def test_a_target_is_reached_exactly(tmp_path: Path, target: int) -> None:
    what, runner = order(tmp_path, judge=True, target=target), Scripted()
    done = grow(runner, what)
    rows = list(read_rows(what.output))
    assert len(rows) == done.kept == target
    assert (done.end, done.rounds) == ("finished", -(-target // 12))
    assert len({row["instruction"] for row in rows}) == target
    assert {row["round"] for row in rows} == set(range(1, done.rounds + 1))


def test_a_larger_target_begins_with_the_rows_of_the_smaller(tmp_path: Path) -> None:
    first = Scripted()
    small = order(tmp_path, target=30, output=tmp_path / "small.jsonl")
    grow(first, small)
    second = Scripted(memory=first.memory)
    grow(second, replace(small, target=50, output=tmp_path / "large.jsonl"))
    assert (tmp_path / "large.jsonl").read_bytes().startswith((tmp_path / "small.jsonl").read_bytes())
    assert (first.computed, second.computed) == (36, 24)


def test_a_larger_target_ended_by_a_limit_has_the_rows_of_the_smaller(tmp_path: Path) -> None:
    small = order(tmp_path, found=seeds(tmp_path, 200), judge=True, target=6)
    first = Scripted()
    grow(first, small)
    before = small.output.read_bytes()
    second = Scripted(memory=first.memory, most=5)
    done = grow(second, replace(small, target=90))
    assert second.stages[:2] == first.stages == [("write 1", 32), ("judge 1", 32)]
    assert (done.end, done.kept, done.replaced) == ("tokens", 32, True)
    assert small.output.read_bytes().startswith(before)


def test_a_limit_never_leaves_fewer_rows(tmp_path: Path) -> None:
    what = order(tmp_path, judge=True, target=20, keep_seeds=True, rejected=tmp_path / "rejected.jsonl")
    grow(Scripted(), what)
    before = [path.read_bytes() for path in (what.output, tmp_path / "rejected.jsonl")]
    other = replace(what, variants=(HARDER,))
    done = grow(Scripted(most=8), other)
    assert (done.end, done.rows, done.kept, done.replaced) == ("tokens", 26, 2, False)
    assert not expand_summary(done)["replaced"]
    assert [path.read_bytes() for path in (what.output, tmp_path / "rejected.jsonl")] == before
    done = grow(Scripted(), replace(other, target=1))  # a finished run replaces the file
    assert (done.end, done.rows, done.replaced) == ("finished", 7, True)
    assert len(list(read_rows(what.output))) == 7


def test_a_part_of_a_round_can_reach_the_target(tmp_path: Path) -> None:
    what, runner = order(tmp_path, found=seeds(tmp_path, 200), target=50), Scripted()
    done = grow(runner, what)
    assert runner.stages == [("write 1", 32), ("write 2", 32)]  # of 400 lines
    assert (done.kept, done.surplus) == (50, 14)
    assert {row["way"] for row in read_rows(what.output)} == {"paraphrase", "harder"}


def test_a_round_with_a_low_yield_is_the_last(tmp_path: Path) -> None:
    same = json.dumps({"instruction": drawn("same"), "output": drawn("too")})
    done = grow(Scripted(lambda _line: same), order(tmp_path, target=100))
    assert (done.kept, done.rounds, done.end) == (1, 6, "finished")
    assert done.why.startswith("rounds 4 to 6 kept 0 new rows of 36 lines, less than 2%")
    assert "100" in done.why
    large = grow(Scripted(lambda _line: same), order(tmp_path, found=seeds(tmp_path, 20), rounds=9))
    assert (large.kept, large.rounds) == (1, 2)
    assert large.why == "round 2 kept 0 new rows of 40 lines, less than 2%"


def test_a_single_small_round_with_a_low_yield_is_not_the_last(tmp_path: Path) -> None:
    same = json.dumps({"instruction": drawn("same"), "output": drawn("too")})
    unlucky = iter([False, True, True, True] + 99 * [False])
    done = grow(
        Scripted(lambda line: same if next(unlucky) else written(line)),
        order(tmp_path, PARAPHRASE, found=seeds(tmp_path, 1), target=9),
    )
    assert (done.kept, done.rounds, done.end) == (9, 11, "finished")


def test_the_number_of_rounds_is_limited(tmp_path: Path) -> None:
    done = grow(Scripted(), order(tmp_path, target=100, rounds=3))
    assert (done.kept, done.rounds) == (36, 3)
    assert done.end == "finished"
    assert "100" in done.why
    assert grow(Scripted(), order(tmp_path, rounds=2)).kept == 24


def test_evolution_uses_the_rows_of_the_previous_round(tmp_path: Path) -> None:
    what = order(tmp_path, PARAPHRASE, found=seeds(tmp_path, 3), rounds=3, evolve=True)
    done = grow(Scripted(), what)
    rows = list(read_rows(what.output))
    assert [row["depth"] for row in rows] == [1] * 3 + [2] * 3 + [3] * 3
    by_id = {row["id"]: row for row in rows}
    for row in rows[3:]:
        parent = by_id[row["parent"]]
        assert (parent["depth"], parent["root"]) == (row["depth"] - 1, row["root"])
    assert done.kept == 9


def test_evolution_ends_without_new_rows(tmp_path: Path) -> None:
    what = order(tmp_path, PARAPHRASE, target=100, evolve=True, least_yield=0.0, judge=True)
    done = grow(Scripted(lambda _line: '{"score": 1}'), what)
    assert done.kept == 0
    assert (done.end, done.rounds) == ("finished", 1)
    assert "100" in done.why
    assert what.output.read_bytes() == b""


def test_instructions_for_answers_keep_the_answer(tmp_path: Path) -> None:
    what = order(tmp_path, Variant(INSTRUCTION))
    grow(Scripted(), what)
    answers = {parent.id: parent.example.answer for parent in what.seeds.parents}
    rows = list(read_rows(what.output))
    assert len(rows) == 6  # equal answers are not near-duplicates here
    assert all(row["output"] == answers[row["parent"]] for row in rows)
    assert all(row["instruction"] == drawn(row["id"]) for row in rows)


def test_texts_get_a_column_for_the_instruction(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text\nThe mill stands at the river.\nFlour is kept dry.\n")
    what = order(tmp_path, Variant(INSTRUCTION), PARAPHRASE, found=read_seeds(tmp_path / "texts.csv"))
    grow(Scripted(), what)
    rows = list(read_rows(what.output))
    assert {(row["way"], row["instruction"] is None) for row in rows} == {("instruction", False), ("paraphrase", True)}
    assert rows[0]["text"] == "The mill stands at the river."


def test_conversations_keep_earlier_messages(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat}) + "\n")
    what = order(tmp_path, PARAPHRASE, found=read_seeds(path))
    grow(Scripted(), what)
    (row,) = read_rows(what.output)
    new = drawn(row["id"])
    assert row["messages"] == [
        chat[0],
        {"role": "user", "content": new},
        {"role": "assistant", "content": f"Answer {new}"},
    ]


def test_kept_seeds_come_first_and_columns_are_carried(tmp_path: Path) -> None:
    found = read_seeds(seeds(tmp_path, 2, topic="mills", score=9, id=None).path, carry=["topic", "score"])
    what = order(tmp_path, PARAPHRASE, found=found, keep_seeds=True, output=tmp_path / "out.parquet")
    done = grow(Scripted(), what)
    rows = list(read_rows(what.output))
    assert (done.rows, done.kept) == (4, 2)
    assert [row["way"] for row in rows] == ["seed", "seed", "paraphrase", "paraphrase"]
    assert [row["id"] for row in rows[:2]] == ["seed-1", "seed-2"]
    assert rows[0]["instruction"] == found.parents[0].example.task
    assert (rows[0]["parent"], rows[0]["model"], rows[0]["depth"]) == (None, None, 0)
    assert all(row["topic"] == "mills" and row["score"] == "9" for row in rows)
    assert all(row["expand_score"] is None for row in rows)  # the seeds have a column `score`


def test_answers_follow_the_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "required": ["sum"], "properties": {"sum": {"type": "integer"}}}

    def script(line: Mapping[str, Any]) -> str:
        name = line["custom_id"]
        asked = line["body"]["response_format"]["json_schema"]["schema"]["properties"]["output"]
        assert asked == schema
        output = {"sum": 1} if "Task 0" in line["body"]["messages"][-1]["content"] else {"sum": "one"}
        return json.dumps({"instruction": drawn(name), "output": output})

    what = order(tmp_path, PARAPHRASE, schema=schema)
    done = grow(Scripted(script), what)
    (row,) = read_rows(what.output)
    assert row["output"] == '{"sum":1}'
    assert done.total.dropped == {"invalid": 5}


def test_seeds_that_fit_no_way(tmp_path: Path) -> None:
    path = tmp_path / "bare.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Why?"}]}\n')
    done = grow(Scripted(), order(tmp_path, Variant(INSTRUCTION), found=read_seeds(path)))
    assert (done.kept, done.rounds, done.end) == (0, 0, "finished")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"target": 0}, "--target"),
        ({"rounds": 0}, "--rounds"),
        ({"per_seed": -1}, "--per-seed"),
        ({"least_score": 6}, "--least-score"),
        ({"least_yield": 2.0}, "--least-yield"),
    ],
)
def test_invalid_requests(tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        order(tmp_path, **how)


def test_only_its_own_output_is_replaced(tmp_path: Path) -> None:
    what = order(tmp_path, rejected=tmp_path / "rejected.jsonl")
    grow(Scripted(), what)
    check_targets(what.output, what.seeds.path, what.rejected)
    for path, message in ((what.seeds.path, what.seeds.path.name), (tmp_path / "other.jsonl", "other.jsonl")):
        if not path.exists():
            path.write_text('{"a": 1}\n')
        before = path.read_bytes()
        with pytest.raises(UsageError, match=message):
            check_targets(path, what.seeds.path, None)
        assert path.read_bytes() == before
    for content, words in (
        (b'{"a": 1}\n', "JSON"),
        (b"a,b\n1,2\n", "text"),
        (b"\x1f\x8bxyz", "gzip"),
        (b"\0\1", "binary"),
    ):
        (tmp_path / "named.parquet").write_bytes(content)
        with pytest.raises(UsageError, match=f"named.parquet .*{words}"):
            check_targets(tmp_path / "named.parquet", what.seeds.path, None)
    with pytest.raises(UsageError, match="--output and --rejected"):
        check_targets(what.output, what.seeds.path, what.output)
    with pytest.raises(UsageError, match="no"):
        check_targets(tmp_path / "no" / "out.jsonl", what.seeds.path, None)
    with pytest.raises(UsageError, match="out.xlsx"):
        check_targets(tmp_path / "out.xlsx", what.seeds.path, None)


def test_prospects(tmp_path: Path) -> None:
    one = prospect_of(order(tmp_path, judge=True))
    assert [(stage.stage, stage.jobs, len(stage.lines), stage.output_tokens) for stage in one.stages] == [
        ("write", 12, 12, 99),
        ("judge", 12, 12, 64),
    ]
    assert (one.rows, one.stages[0].assumed) == (None, None)
    (aimed,) = prospect_of(order(tmp_path, target=70)).stages
    assert aimed.jobs == 108 == len(aimed.lines)  # whole rounds
    assert aimed.jobs >= 70 / ASSUMED_YIELD > aimed.jobs - 12
    short = prospect_of(order(tmp_path, target=70, rounds=2))
    assert (short.stages[0].jobs, short.rows) == (24, None)
    assert "70 rows" in short.notes[0]
    many = prospect_of(order(tmp_path, found=seeds(tmp_path, 2500)))
    assert many.stages[0].jobs == len(many.stages[0].lines) == 5000
    most = prospect_of(order(tmp_path, found=seeds(tmp_path, 12), target=10**8, judge=True))
    assert most.stages[0].jobs >= 10**8 / ASSUMED_YIELD
    assert [len(stage.lines) for stage in most.stages] == [24, 24]
    assert prospect_of(order(tmp_path, target=70, rounds=3, evolve=True)).stages[0].jobs == 36
    path = tmp_path / "bare.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Why?"}]}\n')
    none = prospect_of(order(tmp_path, Variant(INSTRUCTION), found=read_seeds(path), target=5))
    assert (none.stages[0].jobs, none.rows, none.notes) == (0, None, ())


@pytest.mark.parametrize("count", [1, 5, 25, 60, 200])
@pytest.mark.parametrize("target", [1, 20, 60, 150])
def test_a_prospect_has_the_lines_of_the_run(tmp_path: Path, count: int, target: int) -> None:
    """If the assumed share of lines passes the filters."""
    what = order(tmp_path, found=seeds(tmp_path, count), target=target)
    lines = list[Line]()

    def script(line: Mapping[str, Any]) -> str:
        lines.append(line)
        return written(line) if len(lines) % 10 in (0, 1, 2, 4, 5, 7, 8) else "not JSON"

    done = grow(Scripted(script), what)
    assert (done.end, done.kept) == ("finished", target)
    (planned,) = prospect_of(what).stages
    assert planned.jobs == len(planned.lines)
    shorter = min(planned.jobs, len(lines))  # the last part may differ by one line
    assert json.loads(json.dumps(planned.lines[:shorter])) == lines[:shorter]
    assert abs(planned.jobs - len(lines)) <= max(48, target // 2)
