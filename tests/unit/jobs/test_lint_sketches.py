"""What is kept of a stream is small, and right all the same: heads by checksum, samples, distinct values, parts."""

import hashlib
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.jobs.ingest.identity import prompt_text
from tokenmill.jobs.lint.costs import PREFIX_ENDS, FileOrder, PromptTree, Repeats, ToolsBehind
from tokenmill.jobs.lint.differences import side
from tokenmill.jobs.lint.parts import Part, Prompt, located, prompt_of, shortened
from tokenmill.jobs.lint.prefixes import SharedPrefixes, cut, misplaced
from tokenmill.jobs.lint.tokens import Tokens
from tokenmill.jobs.openai.call import check


def least(texts: list[bytes]) -> int:
    """Bytes of a trie of the texts: in order, each without what it shares with the one before."""
    total, before = 0, b""
    for text in sorted(texts):
        shared = next(
            (at for at, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), min(len(before), len(text))
        )
        total, before = total + len(text) - shared, text
    return total


@given(st.lists(st.lists(st.sampled_from([b"a" * 64, b"b" * 64, b"c" * 30]), max_size=5).map(b"".join), max_size=8))
def test_a_tree_counts_what_a_trie_does_to_a_chunk(texts: list[bytes]) -> None:
    tree = PromptTree()
    for text in texts:
        tree.walk(text, 0, 1, PREFIX_ENDS)
        tree.count(len(text), 1)
    assert tree.total(1) == sum(map(len, texts))
    distinct = tree.total(1) - tree.shared(1)
    assert least(texts) <= distinct <= least(texts) + 64 * len(texts)


def test_spellings_are_counted_apart() -> None:
    tree = PromptTree()
    for text, mask in ((b"x" * 128, 3), (b"x" * 128, 1), (b"y" * 128, 2)):
        tree.walk(text, 0, mask, PREFIX_ENDS)
        tree.count(len(text), mask)
    assert (tree.total(1), tree.shared(1)) == (256, 128)
    assert (tree.total(2), tree.shared(2)) == (256, 0)


def test_a_tree_that_is_full_keeps_a_sample_and_scales() -> None:
    tree, rng = PromptTree(most_nodes=2000), random.Random(1)
    for _ in range(4000):
        text = rng.randbytes(64) + b"s" * 640
        tree.walk(text, 0, 1, PREFIX_ENDS)
        tree.count(len(text), 1)
        tree.walk(b"head" * 32, 0, 1, PREFIX_ENDS)
        tree.count(128, 1)
    assert tree.distinct(1) == pytest.approx(4000 * 704, rel=0.1)
    assert tree.shared(1) == pytest.approx(4000 * 128, rel=0.6)


def test_repeats_are_exact_until_there_is_no_room_and_near_after() -> None:
    few, many, none = Repeats(most=100), Repeats(most=1000), Repeats(most=1000)
    assert [few.add(hashlib.sha256(bytes([value])).digest()) for value in (1, 2, 1)] == [False, False, True]
    assert few.count == 1
    for value in range(20_000):
        many.add(hashlib.sha256(str(value % 10_000).encode()).digest())
        none.add(hashlib.sha256(str(value).encode()).digest())
    assert many.count == pytest.approx(10_000, rel=0.2)
    assert none.count == 0


def test_file_order_is_what_one_slot_computes() -> None:
    order = FileOrder()
    for head, tail in (("aaaa", "1"), ("aaaa", "2"), ("bbbb", "3"), ("aaaa", "é1"), ("aaaa", "é2")):
        order.add(head, tail, (len(head), len(tail.encode())))
    assert order.computed_bytes == 5 + 1 + 5 + 7 + 1


def test_tools_behind_changing_system_messages() -> None:
    behind, tools = ToolsBehind(), Part("tools", "t" * 1000)
    for system in "aabc":
        behind.add(Prompt((tools, Part("message 1 (system)", system)), (), ({},)))
    assert behind.cost_bytes() == 2000
    behind.add(Prompt((Part("tools", "short"), Part("message 1 (system)", "d")), (), ({},)))
    assert behind.cost_bytes() == 2000


BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}]},
    {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "hi\nx"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
            {"role": "tool", "content": "y", "tool_call_id": "x"},
        ],
        "chat_template_kwargs": {"a": 1},
    },
    {"messages": [{"role": "system", "content": "é", "name": "n"}]},
]


@pytest.mark.parametrize("body", BODIES)
def test_parts_joined_are_the_canonical_prompt(body: dict[str, Any]) -> None:
    call = check("chat", body)
    prompt = prompt_of(call)
    assert "".join(part.text for part in (*prompt.prefix, *prompt.tail)) == prompt_text(call)
    alone = len(body["messages"]) == 1 and "tools" not in body
    assert bool(prompt.prefix) != alone


def test_parts_of_plain_prompts() -> None:
    assert prompt_of(check("completion", {"prompt": "text"})) == Prompt((), (Part("prompt", "text"),))
    assert prompt_of(check("completion", {"prompt": [1, 2]})).tokens == bytes([1, 0, 0, 0, 2, 0, 0, 0])


def test_places_are_told_by_part() -> None:
    parts = (Part("tools", "tt"), Part("message 1 (system)", "system\nabc", 7))
    assert located(parts, 1) == (parts[0], 1)
    assert located(parts, 2 + 8) == (parts[1], 8)
    assert located(parts, 99) == (parts[1], 10)
    assert shortened(parts, 4) == (parts[0], Part("message 1 (system)", "sy", 7))
    assert shortened(parts, 2) == (parts[0],)


SENTENCES = [
    f"This is sentence {chr(97 + n)} about the {word} of things."
    for n, word in enumerate(
        [
            "order",
            "shape",
            "colour",
            "weight",
            "number",
            "place",
            "name",
            "time",
            "cost",
            "speed",
            "depth",
            "width",
            "height",
            "reason",
            "origin",
            "end",
        ]
    )
]


def heads_of(*texts: str, own: bool = True) -> SharedPrefixes:
    heads = SharedPrefixes()
    for line, text in enumerate(texts, 1):
        heads.add(hash(text) & 0xFFFFFFFF, line, (Part("message 1 (system)", text),), text, own=own)
        heads.job(hash(text) & 0xFFFFFFFF)
    return heads


WHOLE = "\n".join(SENTENCES)


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (WHOLE, WHOLE.replace("sentence b", "sentence B"), "near"),
        (WHOLE, "\n".join(reversed(SENTENCES)), "order"),
        (
            "Context: one two three four five six seven eight nine ten eleven twelve.\n" * 4 + WHOLE,
            "Other words that were retrieved for the second job and are as long as it likes.\n" * 5 + WHOLE,
            "changing",
        ),
    ],
)
def test_what_is_shared_out_of_place(one: str, other: str, kind: str) -> None:
    (found,) = misplaced(heads_of(one, other).all())
    assert (found.kind, found.prefix.line, found.partner.line) == (kind, 2, 1)
    assert 64 <= found.lost_bytes <= len(WHOLE) + 4  # the last letters before it may be the same too


@pytest.mark.parametrize("other", [WHOLE + " And more.", "\n".join(SENTENCES[:5]), "Something else entirely. " * 30])
def test_heads_that_begin_alike_or_have_nothing_in_common_lose_nothing(other: str) -> None:
    assert list(misplaced(heads_of(WHOLE, other).all())) == []


def test_documents_with_common_sentences_are_nobodys_fault() -> None:
    one, other = (f"{kind} text of its own, at length. " * 40 + WHOLE for kind in ("First", "Second"))
    assert [found.kind for found in misplaced(heads_of(one, other, own=False).all())] == ["behind"]
    assert [found.kind for found in misplaced(heads_of(one, other).all())] == ["changing"]


def test_a_sample_of_heads_stays_small() -> None:
    heads = SharedPrefixes(most=10)
    for line in range(500):
        key = hashlib.sha256(str(line).encode()).digest()
        heads.add(int.from_bytes(key[:4], "big"), line, (), str(line), own=True)
    assert 1 <= len(heads.all()) <= 10
    assert heads.scale >= 32


@given(st.text(max_size=300))
def test_pieces_are_the_text(text: str) -> None:
    assert b"".join(cut(text)) == text.encode()


@pytest.mark.parametrize(
    ("text", "at", "dots", "before", "behind"),
    [
        ("abc", 1, False, "a", "bc"),
        ("a  b", 2, True, "a·", "·b"),
        ("a\r\nb\tc\u00a0d\x1b[m", 1, True, "a", "\\r\\nb\\tc\\u00a0d\\u001b[m"),
        ("e\u0301", 1, False, "e", "\\u0301"),
        ("x" * 100, 50, False, "…" + "x" * 28, "x" * 24 + "…"),
        ("\n" * 100, 50, False, "…" + "\\n" * 14, "\\n" * 12 + "…"),
        ("界" * 40, 20, False, "…" + "界" * 14, "界" * 12 + "…"),
        ("\U0001f600\U000e0001", 1, False, "\U0001f600", "\\U000e0001"),
    ],
)
def test_sides_show_what_a_terminal_hides(text: str, at: int, dots: bool, before: str, behind: str) -> None:
    shown = side(text, at, line=3, where="prompt", byte=at, dots=dots)
    assert (shown.before, shown.behind) == (before, behind)


@settings(max_examples=50)
@given(st.text(max_size=200), st.integers(0, 200))
def test_sides_are_never_wider_than_their_room(text: str, at: int) -> None:
    shown = side(text, min(at, len(text)), line=1, where="", byte=0, dots=True)
    assert len(shown.before) <= 29
    assert len(shown.behind) <= 25
    assert (shown.before + shown.behind).isprintable()


def words(text: str) -> int:
    return len(text.split())


def test_tokens_are_counted_where_a_limit_decides() -> None:
    tokens = Tokens(words, context=10)
    tokens.add(1, "a b c", "d e", 7, (5, 3), 5)
    assert tokens.too_long() is None
    tokens.add(2, "a b c", "d e", 7, (5, 3), 6)
    found = tokens.too_long()
    assert found is not None
    assert re.findall(r"\d+", found.detail) == ["2", "5", "6", "10"]  # line, prompt, answer, context
    assert tokens.measured() == pytest.approx((5 + 3 + 3) / (3 + 2 + 2))


def test_tokens_are_estimated_without_a_tokenizer() -> None:
    tokens = Tokens(None, context=100)
    tokens.add(1, "", "x" * 500, 0, (0, 500), None)
    tokens.numbers(2, 200, None)
    assert tokens.measured() is None
    found = tokens.too_long()
    assert found is not None
    assert (found.jobs, re.findall(r"\d+", found.detail)) == (2, ["2", "200", "100"])  # line, prompt, context
    assert "about" in found.detail


def test_long_heads_that_several_jobs_have() -> None:
    tokens = Tokens(None, context=None)
    for line, (key, size) in enumerate([(1, 70_000), (1, 70_000), (2, 90_000), (3, 40_000), (3, 40_000)], 1):
        tokens.add(line, "x" * size, "y", key, (size, 1), None)
    found = tokens.long_prefixes(16_384)
    assert found is not None
    assert found.jobs == 2
    assert "about 17,500 tokens" in found.detail
    assert "line 1" in found.detail
