"""Summaries with a scripted runner: requests, written files, repeated runs."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.scripted_runner import ORIGIN, Said, ScriptedRunner, completion
from tokenmill.errors import UsageError
from tokenmill.recipes.runner import Answered, Line, RecipeEnd
from tokenmill.recipes.summarization.documents import DocumentOptions, gather_documents
from tokenmill.recipes.summarization.forecast import prospect
from tokenmill.recipes.summarization.manifest import MANIFEST, read_manifest
from tokenmill.recipes.summarization.prompts import KINDS, Prompts, summary_prompts, write_packaged
from tokenmill.recipes.summarization.recipe import Summarized, SummarizeRequest, nothing_to_do, summarize
from tokenmill.recipes.summarization.work import token_limits

PROMPTS = Prompts("the digest", {kind: f"prompt for a {kind}" for kind in KINDS})
SAMPLING: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0}
SMALL = replace(ORIGIN, context=256)
LONG = "".join(f"# Chapter {number}\n\n" + "Words of it. " * 30 + "\n\n" for number in range(8))


def words(text: str) -> int:
    return len(text.split())


def user(line: Line) -> str:
    return str(line["body"]["messages"][-1]["content"])


def system(line: Line) -> str:
    return str(line["body"]["messages"][0]["content"])


def echo(line: Line) -> str:
    """A summary that names its text."""
    return f"[{system(line).split()[-1]}: {user(line).split()[0]} {words(user(line))}]"


class RefusingMill(ScriptedRunner):
    """Refuses some lines as too long."""

    def __init__(self, answer: Callable[[Line], Said], longest: int, **more: Any) -> None:
        super().__init__(answer, **more)
        self._longest = longest

    def _one(self, line: Line) -> Answered | None:
        if words(user(line)) > self._longest:
            return Answered(line["custom_id"], None, "too_long", "the prompt is too long")
        return super()._one(line)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("Alpha is first.")
    (folder / "b.txt").write_text("Beta is second.")
    (folder / "deep" / "c.md").write_text("Gamma is third.")
    return folder


def order(docs: Path, **changes: Any) -> SummarizeRequest:
    out = docs.parent / "out"
    return replace(
        SummarizeRequest(gather_documents([docs], DocumentOptions(leave_out=out)), out, PROMPTS, SAMPLING), **changes
    )


def ran(runner: ScriptedRunner, wanted: SummarizeRequest) -> Summarized:
    return asyncio.run(summarize(runner, wanted, tokens=words))


def files(out: Path) -> dict[str, str]:
    found = (path for path in out.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(out).as_posix(): path.read_text() for path in found}


def test_every_document_has_its_summary_and_its_line(docs: Path) -> None:
    runner = ScriptedRunner(echo)
    ended = ran(runner, order(docs))
    assert (ended.documents, ended.done, ended.unchanged, ended.pieces, ended.end) == (3, 3, 0, 3, "finished")
    assert files(docs.parent / "out") == {
        "a.md.md": "[document: Alpha 3]\n",
        "b.txt.md": "[document: Beta 3]\n",
        "deep/c.md.md": "[document: Gamma 3]\n",
    }
    lines = [json.loads(line) for line in (docs.parent / "out" / MANIFEST).read_text().splitlines()]
    first = lines[0]
    assert [line["document"] for line in lines] == ["a.md", "b.txt", "deep/c.md"]
    assert (first["state"], first["model_id"], first["build"], first["finish_reason"]) == (
        "done",
        "sha256:tiny",
        "b1",
        "stop",
    )
    assert (first["pieces"], first["levels"], first["completion_tokens"], first["sampling"]) == (1, 0, 3, SAMPLING)


def test_the_digest_is_first_and_the_document_alone_in_the_users_message(docs: Path) -> None:
    runner = ScriptedRunner(echo)
    ran(runner, order(docs))
    assert {system(line) for line in runner.lines} == {"the digest\n\nprompt for a document"}
    assert [user(line) for line in runner.lines] == ["Alpha is first.", "Beta is second.", "Gamma is third."]
    assert {line["body"]["max_tokens"] for line in runner.lines} == {20}


def test_a_second_run_sends_nothing_and_changes_no_file(docs: Path) -> None:
    ran(ScriptedRunner(echo), order(docs))
    out = docs.parent / "out"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    runner = ScriptedRunner(echo)
    ended = ran(runner, order(docs))
    assert (ended.done, ended.unchanged) == (0, 3)
    assert runner.stages == []
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    told = nothing_to_do(order(docs), read_manifest(out), ORIGIN.model_id)
    assert told is not None
    assert told.unchanged == 3
    assert nothing_to_do(order(docs), read_manifest(out), "another model") is None


def test_only_changed_documents_are_summarized_again(docs: Path) -> None:
    ran(ScriptedRunner(echo), order(docs))
    (docs / "b.txt").write_text("Delta is new here.")
    (docs / "d.md").write_text("Epsilon comes late.")
    runner = ScriptedRunner(echo)
    ended = ran(runner, order(docs))
    assert [user(line) for line in runner.lines] == ["Delta is new here.", "Epsilon comes late."]
    assert (ended.done, ended.unchanged) == (2, 2)
    assert files(docs.parent / "out")["b.txt.md"] == "[document: Delta 4]\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": replace(PROMPTS, digest="another")},
        {"prompts": replace(PROMPTS, texts={**PROMPTS.texts, "reduce": "other"})},
        {"sampling": {"max_tokens": 21}},
    ],
)
def test_other_inputs_summarize_everything_again(docs: Path, changes: dict[str, Any]) -> None:
    ran(ScriptedRunner(echo), order(docs))
    assert ran(ScriptedRunner(echo), order(docs, **changes)).done == 3


def test_a_long_document_is_read_in_pieces_and_reduced(docs: Path) -> None:
    (docs / "a.md").write_text(LONG)
    runner = ScriptedRunner(echo, origin=SMALL)
    ended = ran(runner, order(docs))
    assert [len(lines) for _, lines in runner.stages] == [10, 1]
    pieces = [line for line in runner.lines if "piece" in system(line)]
    assert "".join(user(line) for line in pieces) == LONG
    assert all(user(line).startswith("# Chapter") for line in pieces)
    assert user(runner.stages[1][1][0]).startswith("Part 1:\n[piece: # ")
    assert (ended.done, ended.reduced, ended.pieces) == (3, 1, 10)
    entry = read_manifest(docs.parent / "out").entries["a.md"]
    assert (entry.pieces, entry.levels) == (8, 1)
    assert files(docs.parent / "out")["a.md.md"].startswith("[reduce: Part ")
    # All prompts share the digest.
    assert all(system(line).startswith("the digest\n\n") for line in runner.lines)


def test_notes_that_do_not_fit_are_reduced_in_levels(docs: Path) -> None:
    (docs / "a.md").write_text(LONG * 6)

    def wordy(line: Line) -> str:
        return "note " * 20

    runner = ScriptedRunner(wordy, origin=SMALL)
    ended = ran(runner, order(docs))
    assert ended.failed == ()
    entry = read_manifest(docs.parent / "out").entries["a.md"]
    assert entry.levels is not None
    assert entry.levels >= 2
    assert len(runner.stages) == entry.levels + 1
    for line in runner.lines:  # every prompt fits the context
        assert words(system(line)) + words(user(line)) + 20 <= 256


def test_a_piece_refused_as_too_long_is_halved(docs: Path) -> None:
    (docs / "a.md").write_text(LONG)
    runner = RefusingMill(echo, 70, origin=SMALL)
    ended = ran(runner, order(docs))
    assert ended.failed == ()
    read = "".join(user(line) for line in runner.lines if "piece" in system(line) and words(user(line)) <= 70)
    assert sorted(read.split()) == sorted(LONG.split())
    entry = read_manifest(docs.parent / "out").entries["a.md"]
    assert entry.pieces == 16
    # The notes are in the order of the text; halves replace the piece they were cut from.
    reduced = [user(line) for line in runner.lines if system(line).endswith("reduce") and "[piece" in user(line)]
    kinds = [note.split()[1] for notes in reduced for note in notes.split("\n") if note.startswith("[")]
    assert kinds == ["#", "Words"] * 8


def test_a_document_refused_as_too_long_is_split(docs: Path) -> None:
    (docs / "a.md").write_text("One two three. " * 8)
    runner = RefusingMill(echo, 14, origin=SMALL)
    ended = ran(runner, order(docs))
    assert (ended.done, ended.reduced) == (3, 1)
    assert read_manifest(docs.parent / "out").entries["a.md"].pieces == 2


def test_a_document_that_never_fits_fails(docs: Path) -> None:
    runner = RefusingMill(echo, 0)
    ended = ran(runner, order(docs))
    assert [failure.code for _, failure in ended.failed] == ["too_long"] * 3
    assert len(runner.stages) <= 8
    assert files(docs.parent / "out") == {}


def test_a_budget_ends_the_run_and_the_same_command_resumes(docs: Path) -> None:
    (docs / "a.md").write_text(LONG)
    runner = ScriptedRunner(echo, origin=SMALL, stop_after=9)
    ended = ran(runner, order(docs))
    assert (ended.end, ended.done, ended.left) == ("tokens", 1, 2)
    assert files(docs.parent / "out").keys() == {"b.txt.md"}
    again = ScriptedRunner(echo, origin=SMALL, known=runner.known)
    ended = ran(again, order(docs))
    assert (ended.end, ended.done, ended.unchanged) == ("finished", 2, 1)
    assert again.spent.reused == 8
    assert again.spent.answers == 2


def test_a_lost_output_folder_costs_nothing(docs: Path) -> None:
    (docs / "a.md").write_text(LONG)
    runner = ScriptedRunner(echo, origin=SMALL)
    ran(runner, order(docs))
    out = docs.parent / "out"
    before = files(out)
    for path in sorted(out.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = ScriptedRunner(echo, origin=SMALL, known=runner.known)
    ended = ran(again, order(docs))
    assert (ended.done, again.spent.answers) == (3, 0)
    assert files(out) == before


def test_a_kill_between_manifest_and_file_is_repaired(docs: Path) -> None:
    runner = ScriptedRunner(echo)
    ran(runner, order(docs))
    out = docs.parent / "out"
    stale = (out / "b.txt.md").read_bytes()
    (docs / "b.txt").write_text("Delta is new here.")
    ran(runner, order(docs))
    (out / "b.txt.md").write_bytes(stale)  # as after a kill before the replacement
    (out / "a.md.md").unlink()
    again = ScriptedRunner(echo, known=runner.known)
    ended = ran(again, order(docs))
    assert (ended.done, ended.edited, again.spent.answers) == (2, (), 0)
    assert files(out)["b.txt.md"] == "[document: Delta 4]\n"


def test_equal_summaries_without_a_manifest_are_kept(docs: Path) -> None:
    runner = ScriptedRunner(echo)
    ran(runner, order(docs))
    out = docs.parent / "out"
    (out / MANIFEST).unlink()
    (out / "a.md.md").write_text("by hand")
    ended = ran(ScriptedRunner(echo, known=runner.known), order(docs))
    assert (ended.done, ended.edited) == (2, ("a.md",))
    assert files(out)["a.md.md"] == "by hand"
    quiet = ScriptedRunner(echo)
    assert ran(quiet, order(docs)).edited == ("a.md",)
    assert quiet.stages == []


def test_an_edited_summary_is_kept_unless_forced(docs: Path) -> None:
    ran(ScriptedRunner(echo), order(docs))
    edited = docs.parent / "out" / "a.md.md"
    edited.write_text("by hand")
    (docs / "a.md").write_text("Alpha has changed.")
    runner = ScriptedRunner(echo)
    assert ran(runner, order(docs)).edited == ("a.md",)
    assert runner.stages == []
    assert edited.read_text() == "by hand"
    ended = ran(ScriptedRunner(echo), order(docs, force=True))
    assert (ended.done, ended.edited, ended.unchanged) == (1, (), 2)
    assert edited.read_text() == "[document: Alpha 3]\n"


def test_a_summary_edited_during_the_run_is_kept(docs: Path) -> None:
    ran(ScriptedRunner(echo), order(docs))
    edited = docs.parent / "out" / "a.md.md"
    (docs / "a.md").write_text("Alpha has changed.")

    def meanwhile(line: Line) -> str:
        edited.write_text("by hand")
        return echo(line)

    assert ran(ScriptedRunner(meanwhile), order(docs)).edited == ("a.md",)
    assert edited.read_text() == "by hand"


def test_summaries_of_deleted_documents_are_kept_until_pruned(docs: Path) -> None:
    ran(ScriptedRunner(echo), order(docs))
    (docs / "deep" / "c.md").unlink()
    (docs / "b.txt").unlink()
    (docs.parent / "out" / "b.txt.md").write_text("by hand")
    ended = ran(ScriptedRunner(echo), order(docs))
    assert (ended.vanished, ended.pruned) == (("b.txt", "deep/c.md"), 0)
    assert len(files(docs.parent / "out")) == 3
    said = list[str]()
    ended = asyncio.run(summarize(ScriptedRunner(echo), order(docs, prune=True), tokens=words, tell=said.append))
    assert ended.pruned == 1
    assert files(docs.parent / "out").keys() == {"a.md.md", "b.txt.md"}
    assert not (docs.parent / "out" / "deep").exists()
    assert "was edited" in said[0]


def test_unreadable_documents_do_not_count_as_deleted(docs: Path) -> None:
    (docs / "t.csv").write_text("id,text\nx,one\n")
    reading = DocumentOptions(id_column="id", leave_out=docs.parent / "out")
    ran(ScriptedRunner(echo), order(docs, found=gather_documents([docs], reading)))
    (docs / "t.csv").write_text("id,text\nx,one\nx,two\n")
    (docs / "a.md").write_bytes(b"\0")
    ended = ran(ScriptedRunner(echo), order(docs, found=gather_documents([docs], reading), prune=True))
    assert (ended.vanished, len(ended.skipped)) == ((), 2)
    assert len(files(docs.parent / "out")) == 4


def test_a_failure_is_recorded_and_retried_as_another_job(docs: Path) -> None:
    def no_beta(line: Line) -> str | None:
        return None if "Beta" in user(line) else echo(line)

    first = ScriptedRunner(no_beta)
    ended = ran(first, order(docs))
    assert [(name, failure.code) for name, failure in ended.failed] == [("b.txt", "refused")]
    assert ended.done == 2
    entry = read_manifest(docs.parent / "out").entries["b.txt"]
    assert (entry.state, entry.failures, entry.message) == ("failed", 1, "scripted to fail")
    second = ScriptedRunner(echo)
    assert ran(second, order(docs)).done == 1
    assert second.lines[0]["custom_id"] not in {line["custom_id"] for line in first.lines}
    assert read_manifest(docs.parent / "out").entries["b.txt"].failures == 0


def test_a_failed_update_keeps_the_old_summary(docs: Path) -> None:
    ran(ScriptedRunner(echo), order(docs))
    (docs / "a.md").write_text("Alpha has changed.")
    ran(ScriptedRunner(lambda _: None), order(docs))
    assert files(docs.parent / "out")["a.md.md"] == "[document: Alpha 3]\n"
    ended = ran(ScriptedRunner(lambda _: "better"), order(docs))
    assert (ended.done, ended.edited) == (1, ())


@pytest.mark.parametrize("said", ["", " \n", "<think>all thought"])
def test_an_empty_answer_is_a_failure(docs: Path, said: str) -> None:
    ended = ran(ScriptedRunner(lambda _: said), order(docs))
    assert [failure.code for _, failure in ended.failed] == ["empty"] * 3


def test_reasoning_is_not_in_the_summary_and_a_cut_is_reported(docs: Path) -> None:
    runner = ScriptedRunner(lambda line: completion("<think>hm</think>\nGood.", line, finish="length"))
    ended = ran(runner, order(docs))
    assert {*files(docs.parent / "out").values()} == {"Good.\n"}
    assert ended.cut == ("a.md", "b.txt", "deep/c.md")


def test_cut_reasoning_opened_by_the_template_is_not_a_summary(docs: Path) -> None:
    def thinks(line: Line) -> Said:
        if "Alpha" in user(line):
            return completion("Let me see, Alpha is", line, finish="length")
        return "It is second.</think>\nGood."

    ended = ran(ScriptedRunner(thinks), order(docs))
    assert [(name, failure.code) for name, failure in ended.failed] == [("a.md", "empty")]
    assert {*files(docs.parent / "out").values()} == {"Good.\n"}


def test_cancelled_jobs_are_not_failures(docs: Path) -> None:
    class CancelledRunner(ScriptedRunner):
        def _one(self, line: Line) -> Answered | None:
            return Answered(line["custom_id"], None, "cancelled", "by somebody")

    class Ended(CancelledRunner):
        async def run(self, stage: str, lines: Any) -> Any:
            end: RecipeEnd = "cancelled"
            return replace(await super().run(stage, lines), end=end)

    ended = ran(Ended(echo), order(docs))
    assert (ended.end, ended.left, ended.failed) == ("cancelled", 3, ())
    assert read_manifest(docs.parent / "out").entries == {}


def test_a_short_context_is_refused_with_a_sufficient_one(docs: Path) -> None:
    (docs / "a.md").write_text(LONG)
    with pytest.raises(UsageError, match="130") as caught:
        ran(ScriptedRunner(echo, origin=replace(ORIGIN, context=130)), order(docs))
    hint = caught.value.hint or ""
    enough = int(hint.partition("--context ")[2].split(",")[0])
    assert ran(ScriptedRunner(echo, origin=replace(ORIGIN, context=enough)), order(docs)).done == 3


def test_an_unknown_context_must_be_given(docs: Path) -> None:
    runner = ScriptedRunner(echo, origin=replace(ORIGIN, context=None))
    with pytest.raises(UsageError) as caught:
        ran(runner, order(docs))
    assert "--context" in (caught.value.hint or "")
    assert ran(runner, order(docs, context=4096)).done == 3


def test_without_a_tokenizer_a_larger_margin_is_kept() -> None:
    exact, estimated = token_limits(8192, PROMPTS, words, answer=100), token_limits(8192, PROMPTS, None, answer=100)
    assert estimated.available("document") < 0.8 * exact.available("document")
    assert estimated.count("x" * 100) == 25


def test_the_prospect_has_the_lines_of_the_run(docs: Path) -> None:
    ran(ScriptedRunner(echo, origin=SMALL), order(docs))
    (docs / "a.md").write_text(LONG * 4)
    (docs / "b.txt").write_text("Beta has changed.")
    expected = prospect(order(docs), SMALL.model_id, 256, words)
    runner = ScriptedRunner(lambda _: "note " * 20, origin=SMALL)
    ran(runner, order(docs))
    assert [(stage.stage, stage.jobs) for stage in expected.stages] == [
        (name, len(lines)) for name, lines in runner.stages
    ]
    assert expected.stages[0].lines == runner.stages[0][1]
    assert expected.rows == 2
    assert all(stage.output_tokens == 20 for stage in expected.stages)
    assert any("1 document unchanged" in note for note in expected.notes)
    assert prospect(order(docs), SMALL.model_id, None, words).stages == ()


def test_fully_answered_documents_need_no_reducing(docs: Path) -> None:
    (docs / "a.md").write_text(LONG * 4)
    runner = ScriptedRunner(lambda line: f"note {len(user(line))} " * 6, origin=SMALL)
    ran(runner, order(docs))
    known = {str(line["body"]): line for _, lines in runner.stages for line in lines}
    lost = order(docs, out=docs.parent / "lost")

    def stored(line: Line) -> Answered | None:
        asked = known.get(str(line["body"]))
        return None if asked is None else Answered(line["custom_id"], completion(f"note {len(user(line))} " * 6))

    whole = prospect(lost, SMALL.model_id, 256, words, stored)
    assert [stage.stage for stage in whole.stages] == ["read"]
    assert whole.stages[0].lines == runner.stages[0][1]
    known.popitem()  # the answer of the last level
    assert len(prospect(lost, SMALL.model_id, 256, words, stored).stages) > 1


def test_the_prospect_of_pruning_names_the_summaries(docs: Path) -> None:
    ran(ScriptedRunner(echo, origin=SMALL), order(docs))
    for name in ("a.md", "b.txt"):
        (docs / name).unlink()
    (docs.parent / "out" / "b.txt.md").write_text("Mine.")
    found = prospect(order(docs, prune=True), SMALL.model_id, 256, words)
    removed, kept = found.notes[1:]
    assert removed.startswith("--prune ")
    assert removed.endswith("1 summary of deleted documents: a.md")
    assert kept.startswith("1 summary ")
    assert (docs.parent / "out" / "a.md.md").exists()
    assert len(prospect(order(docs), SMALL.model_id, 256, words).notes) == 1


def test_prompts_are_written_edited_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    made = write_packaged(folder, force=False)
    assert [path.name for path in made] == ["document.md", "piece.md", "reduce.md"]
    packaged = summary_prompts(None, None, max_tokens=300, language="German")
    assert summary_prompts(folder, None, max_tokens=300, language="German") == packaged
    assert "at most 180 words" in packaged.system("document")
    assert "Write in German." in " ".join(packaged.system("piece").split())
    (folder / "reduce.md").write_text("In {language}.")
    (folder / "piece.md").unlink()
    edited = summary_prompts(folder, None, max_tokens=300, language=None)
    assert edited.texts["reduce"] == "In the language of the document."
    assert edited.sha256 != packaged.sha256
    with pytest.raises(UsageError, match="document.md"):
        write_packaged(folder, force=False)
    write_packaged(folder, force=True)
    (folder / "reduce.md").write_text("In {langage}.")
    with pytest.raises(UsageError, match="langage") as caught:
        summary_prompts(folder, None, max_tokens=300, language=None)
    assert "{language}" in (caught.value.hint or "")


def test_invalid_prompt_folders_and_digests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="document.md, piece.md, reduce.md"):
        summary_prompts(tmp_path, None, max_tokens=9, language=None)
    with pytest.raises(UsageError, match="no.md"):
        summary_prompts(None, tmp_path / "no.md", max_tokens=9, language=None)
    (tmp_path / "digest.md").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="digest.md"):
        summary_prompts(None, tmp_path / "digest.md", max_tokens=9, language=None)
