"""Reasoning separated from answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.reasoning import SplitReasoning, has_reasoning, join_reasoning, split_reasoning

PLAIN = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<>[]|◁▷"))


@pytest.mark.parametrize(
    ("text", "answer", "reasoning"),
    [
        ("Paris.", "Paris.", None),
        ("<think>\nFrance... Paris.\n</think>\n\nParis.", "Paris.", "France... Paris."),
        ("\n\n<think>a</think>b", "b", "a"),
        ("<think>\n\n</think>\n\nParis.", "Paris.", ""),  # tags without reasoning
        ("<think>never done", "", "never done"),
        ("[THINK]hm[/THINK]Yes.", "Yes.", "hm"),
        ("<seed:think>hm</seed:think>Yes.", "Yes.", "hm"),
        ("◁think▷hm◁/think▷Yes.", "Yes.", "hm"),
        ("<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", "hm"),
        ("<|channel>thought\nhm<channel|>Yes.", "Yes.", "hm"),
        ("<think>hm</think><response>Yes.</response>", "Yes.", "hm"),
        ("<think>hm</think>\n<answer>\nYes.\n</answer>", "Yes.", "hm"),
        ("Here is my thought process: hm\nHere is my response: Yes.", "Yes.", "hm"),
        ("Here's my thought process: hm", "", "hm"),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "Yes.",
            "hm",
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes.",
            "Yes.",
            "a\n\nb",
        ),
        ("<|channel|>final<|message|>Yes.", "Yes.", None),
        ("<|channel|>analysis<|message|>still at it", "", "still at it"),
        (
            "Use the tag <think> to begin and </think> to end.",
            "Use the tag <think> to begin and </think> to end.",
            None,
        ),
        ("  indented code stays\n", "  indented code stays\n", None),
    ],
)
def test_tags_of_models(text: str, answer: str, reasoning: str | None) -> None:
    assert split_reasoning(text) == SplitReasoning(answer, reasoning)
    assert has_reasoning(text) == (reasoning is not None)


def test_only_a_closing_tag_means_that_the_template_opened_it() -> None:
    assert split_reasoning("France... Paris.\n</think>\n\nParis.") == SplitReasoning(
        "Paris.", "France... Paris.", by_template=True
    )
    assert split_reasoning("hm</seed:think>Yes.") == SplitReasoning("Yes.", "hm", by_template=True)


@pytest.mark.parametrize(
    ("cut", "opened", "expected"),
    [
        (True, True, SplitReasoning("", "France, whose")),
        (True, False, SplitReasoning("France, whose")),  # no tag
        (False, True, SplitReasoning("France, whose")),  # not cut off, so it is an answer
    ],
)
def test_reasoning_that_was_cut_off(cut: bool, opened: bool, expected: SplitReasoning) -> None:
    assert split_reasoning("France, whose", cut=cut, opened=opened) == expected


@given(PLAIN, PLAIN)
def test_joined_reasoning_is_split_again(answer: str, reasoning: str) -> None:
    parted = split_reasoning(join_reasoning(answer.strip(), reasoning.strip()))
    assert (parted.answer, parted.reasoning) == (answer.strip(), reasoning.strip())


@given(PLAIN)
def test_text_without_tags_is_unchanged(text: str) -> None:
    assert split_reasoning(join_reasoning(text, None)) == SplitReasoning(text)
