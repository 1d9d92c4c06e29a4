"""Prompt files: packaged, edited and invalid ones."""

from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.identity import CHUNK_BYTES
from tokenmill.recipes.expansion.prompts import (
    JUDGE,
    PACKAGED,
    expand_methods,
    fields_of,
    load_prompt,
    parse,
    placeholders,
    shown,
    values_of,
    write_prompts,
)
from tokenmill.recipes.expansion.seeds import Example, Shape
from tokenmill.recipes.expansion.transforms import FORMAT, INSTRUCTION, LANGUAGE, WAYS, Variant, variants

PAIR = Shape("output", "instruction", "input", parts=("instruction", "input", "output"))
TEXT = Shape("text")


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_prompts_share_a_long_prefix(name: str) -> None:
    prompt = load_prompt(name)
    texts = []
    for example in (Example("Add.", "1, 2", "3"), Example("Subtract.", "4, 5", "-1")):
        fields = {"fields": fields_of(name, PAIR, None), "original": example.task}
        values = dict.fromkeys(placeholders(name), "?") | values_of(example, PAIR) | fields
        system, user = prompt.messages(values)
        assert (system["role"], user["role"]) == ("system", "user")
        assert "{" not in user["content"]
        assert example.answer in user["content"]
        texts.append(system["content"] + "\n" + user["content"])
    assert texts[0] != texts[1]
    shared = next(at for at, (one, two) in enumerate(zip(*texts, strict=False)) if one != two)
    assert shared > CHUNK_BYTES  # the prefix by which jobs are sorted


def test_prompts_are_written_edited_and_used(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    paths = write_prompts(folder)
    assert sorted(path.stem for path in paths) == sorted(PACKAGED)
    assert load_prompt("harder", folder) == load_prompt("harder")
    (folder / "harder.md").write_text("## user\nHarder, please: {example}\n")
    edited = load_prompt("harder", folder)
    assert edited.sha256 != load_prompt("harder").sha256
    assert edited.messages({"example": "x"}) == [{"role": "user", "content": "Harder, please: x"}]
    (folder / "judge.md").unlink()
    assert load_prompt(JUDGE, folder) == load_prompt(JUDGE)  # the packaged prompt replaces a missing file
    with pytest.raises(UsageError, match="broader.md"):
        write_prompts(folder, ["broader"])


def test_a_user_file_defines_a_way(tmp_path: Path) -> None:
    (tmp_path / "shorter.md").write_text("For the impatient.\n\n## USER\nShorter: {example} {{as it is}}\n{fields}\n")
    assert expand_methods(tmp_path) == [*WAYS, "shorter"]
    assert variants(["shorter"], [], [], expand_methods(tmp_path)) == (Variant("shorter"),)
    (message,) = load_prompt("shorter", tmp_path).messages({"example": "x", "fields": "y"})
    assert message["content"] == "Shorter: x {as it is}\ny"


@pytest.mark.parametrize(
    ("name", "text", "message", "hint"),
    [
        (
            "harder",
            "Note {exampel}.\n\n## user\na\n{exampel}",
            r"harder.md, line 5: .*\{exampel\}",
            "{example}?",
        ),
        ("harder", "## system\n{zzz}\n## user\n{example}", r"line 2: .*\{zzz\}", "{example}"),
        ("harder", "## user\n{example}{language}", r"\{language\}", "{instruction}"),
        ("judge", "## user\n{example}{fields}", r"\{fields\}", "{original}"),
        ("harder", "## user\n{example}\n{*}", r"line 3: .*\{\*\}", "{instruction}"),
        ("harder", "## user\n{example}\n{ x", "line 3", "{{"),
        ("harder", "## system\nx", "## user", "--write-prompts"),
        ("harder", "## user\n{example}\n## user\n{example}", "line 3: .*## user", ""),
        ("harder", "## user\nno example", "harder.md", "{example}"),
    ],
)
def test_errors_name_the_file_and_the_line(name: str, text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(name, text, f"{name}.md")
    assert hint in (caught.value.hint or "")


def test_folders_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        load_prompt("harder", tmp_path / "nowhere")
    (tmp_path / "harder.md").write_bytes(b"## user\n\xff {example}")
    with pytest.raises(UsageError, match="UTF-8"):
        load_prompt("harder", tmp_path)


def test_other_headings_are_part_of_the_text() -> None:
    (message,) = parse("harder", "## user\n## Rules\n{example}", "x").messages({"example": "y"})
    assert message["content"] == "## Rules\ny"


@pytest.mark.parametrize(
    ("way", "shape", "schema", "words"),
    [
        ("harder", PAIR, None, ['"instruction", "input" and "output"', "empty where"]),
        ("harder", TEXT, None, ["the new text alone"]),
        ("harder", TEXT, {"type": "array"}, ["the new text alone", '{"type":"array"}']),
        ("harder", PAIR, {"type": "array"}, ['"output" is JSON that follows this schema: {"type":"array"}']),
        (INSTRUCTION, PAIR, {"type": "array"}, ["the instruction alone"]),
    ],
)
def test_fields_say_how_to_answer(way: str, shape: Shape, schema: object, words: list[str]) -> None:
    found = fields_of(way, shape, schema)
    assert all(word in found for word in words)


def test_an_example_has_the_names_of_its_parts() -> None:
    before = ({"role": "system", "content": "Be brief."},)
    assert shown(Example("Add.", "", "3", before), PAIR) == (
        "Conversation before:\nsystem: Be brief.\n\nInstruction:\nAdd.\n\nOutput:\n3"
    )
    assert shown(Example(answer="As it is."), TEXT) == "As it is."


def test_variants_of_languages_and_formats() -> None:
    found = variants(["paraphrase", "language", "format", "language"], ["de", "Klingon"], ["table"], WAYS)
    assert found == (
        Variant("paraphrase"),
        Variant(LANGUAGE, "de"),
        Variant(LANGUAGE, "Klingon"),
        Variant(FORMAT, "table"),
    )
    assert [variant.words for variant in found] == [
        {},
        {"language": "German"},
        {"language": "Klingon"},
        {"format": "a Markdown table"},
    ]
    assert [variant.label for variant in found][1:3] == ["language de", "language Klingon"]
    usual = variants([], ["fr"], [], WAYS)
    assert [variant.way for variant in usual] == ["paraphrase", "harder", "broader", "language"]


@pytest.mark.parametrize(
    ("ways", "languages", "formats", "message", "hint"),
    [
        (["softer"], [], [], "softer", "softer.md"),
        (["language"], [], [], "language", "--languages"),
        (["format"], [], [], "format", "--formats"),
        (["harder"], ["de"], [], "--languages", "language"),
        (["harder"], [], ["json"], "--formats", "format"),
    ],
)
def test_invalid_ways(ways: list[str], languages: list[str], formats: list[str], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        variants(ways, languages, formats, WAYS)
    assert hint in (caught.value.hint or "")
