"""What batch jobs leave in the cache: shared prefixes, the newest tail of each, and tails that others wait for."""

import pytest

from support.kv_cells import Grown
from tokenmill.native.kv.prefix_cache import OpenedSequence
from tokenmill.native.kv.radix import as_tokens

DIGEST = list(range(100, 120))


def test_of_batch_tails_off_a_fork_the_newest_alone_stays() -> None:
    grown = Grown()
    first, second = grown.open([*DIGEST, 1, 1]), grown.open([*DIGEST, 2, 2])
    grown.answer(first, [5, 5])
    grown.cache.close(first, "prompt")
    assert grown.cache.used == 20 + 2 + 2, "its answer has gone"
    grown.cache.close(second, "prompt")
    assert grown.cache.used == grown.cached([*DIGEST, 2, 2]) == 22
    assert grown.cached([*DIGEST, 1, 1]) == 20


def test_dropping_a_tail_costs_one_cut() -> None:
    grown = Grown()
    for tail in (1, 2):
        grown.leave([*DIGEST, tail, tail])
    sequence = grown.open([*DIGEST, 3, 3])
    cuts = len(grown.cells.cuts)
    grown.cache.close(sequence, "prompt")
    assert len(grown.cells.cuts) == cuts + 1


def test_also_where_the_other_branch_is_gone() -> None:
    grown = Grown()
    for tail in (1, 2, 3):
        grown.leave([*DIGEST, tail, tail])
        assert grown.cache.used == grown.cached([*DIGEST, tail, tail]) == 22


def test_an_unbranched_path_stays_whole_until_a_second_sequence_leaves_its_own_tail() -> None:
    grown = Grown()
    grown.leave([*DIGEST, 1, 1])
    assert grown.cache.used == 22
    sequence = grown.open([*DIGEST, 2], compute=0)
    assert grown.cells.content(sequence) == DIGEST
    assert grown.cache.used == 22
    grown.cache.close(sequence, "nothing")
    assert grown.cached([*DIGEST, 1, 1]) == 22
    grown.leave([*DIGEST, 2])
    assert (grown.cache.used, grown.cached([*DIGEST, 1, 1])) == (21, 20)


def test_a_longer_prompt_over_the_same_path_is_no_fork() -> None:
    grown = Grown()
    grown.leave(DIGEST)
    grown.leave([*DIGEST, 1, 1])
    assert grown.cache.used == 22
    grown.leave([*DIGEST, 1, 1, 1])
    assert grown.cache.used == 23


def test_a_fork_made_by_an_answer_is_one_too() -> None:
    grown = Grown()
    first = grown.open(DIGEST)
    grown.leave([*DIGEST, 1, 1])
    assert grown.cache.used == 22
    grown.answer(first, [2])
    assert grown.cache.used == 23
    third = grown.open([*DIGEST, 3])
    grown.cache.close(first, "nothing")
    grown.cache.close(third, "prompt")
    assert grown.cache.used == 21, "the fork is remembered, and the newest tail is the third one's"


def test_a_fork_within_an_answer_is_no_fork_of_the_prompt() -> None:
    grown = Grown()
    first = grown.open(DIGEST)
    grown.answer(first, [1, 2, 3])
    second = grown.open([*DIGEST, 1, 2, 9])
    grown.cache.close(first, "prompt")
    grown.cache.close(second, "nothing")
    assert grown.cache.used == 20


def test_a_fork_that_was_trimmed_away_is_forgotten() -> None:
    grown = Grown(cells=30)
    for tail in (1, 2):
        grown.leave([*DIGEST, tail])
    assert grown.cache.make_room(20)
    assert grown.cached(DIGEST) == 10
    grown.leave([*DIGEST[:10], 5, 5])
    assert grown.cache.used == 12


def test_a_sequence_that_took_a_keepers_place_does_not_move_the_fork() -> None:
    grown = Grown(sequences=2)
    for tail in (1, 2):
        grown.leave([*DIGEST, tail])
    grown.open([7])
    grown.leave([*DIGEST, 3, 3])
    assert grown.cache.used == 20 + 2 + 1
    grown.leave([*DIGEST, 4])
    assert grown.cache.used == 20 + 1 + 1, "what parts at its end leaves one tail there"


def test_a_sequence_that_came_no_further_than_the_fork_keeps_it() -> None:
    grown = Grown(sequences=3)
    for tokens in ([*DIGEST, 1], [*DIGEST, 2], [*DIGEST[:10], 3]):
        grown.leave(tokens)
    grown.open([7])
    sequence = grown.open([*DIGEST, 3, 3], compute=0)
    grown.cache.close(sequence, "prompt")
    assert grown.cached(DIGEST) == 20
    assert grown.cache.used == 20 + 1 + 1, "beside the tail of the earlier fork"


def test_a_prefix_is_kept_though_a_running_sequence_holds_it_too() -> None:
    grown = Grown()
    first, second = grown.open(DIGEST), grown.open([*DIGEST, 1])
    grown.cache.close(first, "prompt")
    grown.cache.close(second, "nothing")
    assert grown.cache.used == 20


def test_the_tail_of_a_chat_stays_beyond_a_fork() -> None:
    grown = Grown()
    grown.leave([*DIGEST, 1, 1], "all", answer=(5, 6))
    grown.leave([*DIGEST, 2, 2], "all", answer=(7,))
    grown.leave([*DIGEST, 3, 3])
    grown.leave([*DIGEST, 4, 4])
    assert grown.cache.used == 20 + 4 + 3 + 2
    assert grown.cached([*DIGEST, 1, 1, 5, 6]) == 24


def test_a_running_tail_beyond_the_split_stays() -> None:
    grown = Grown()
    first = grown.open([*DIGEST, 1, 1])
    grown.leave([*DIGEST, 2, 2])
    grown.leave([*DIGEST, 3, 3])
    assert grown.cells.content(first) == [*DIGEST, 1, 1]
    assert grown.cache.used == 22 + 2


def test_a_shared_prefix_stays_after_a_fork_before_it() -> None:
    grown = Grown()
    inner = [*DIGEST, *range(8)]
    grown.leave([*inner, 1])
    grown.leave([*inner, 2])
    grown.leave([*DIGEST, 9])
    assert grown.cached(inner) == 28


def test_the_first_job_of_a_new_digest_is_kept_beyond_the_few_tokens_of_the_chat_template() -> None:
    grown = Grown()
    template, other = [1, 2, 3], list(range(200, 215))
    grown.leave([*template, *DIGEST, 7])
    grown.leave([*template, *other, 8])  # forks at the third token, and nothing else of it is known to be shared
    assert grown.cached([*template, *other, 8]) == 19
    assert grown.cached([*template, *DIGEST, 7]) == 3, "the newest such tail alone stays"
    grown.leave([*template, *other, 9])
    assert grown.cached([*template, *other, 8]) == 18
    grown.leave([*template, 4])
    assert grown.cached([*template, *other]) == 18, "shown to be shared"
    assert grown.cache.used == 18 + 1 + 1, "each of the two forks has its newest tail"


def test_the_same_prompt_twice_costs_one_token() -> None:
    grown = Grown()
    for _ in range(3):
        grown.leave(DIGEST)
        assert grown.cache.used == 20
    first, second = grown.open(DIGEST), grown.open(DIGEST)
    assert grown.cells.content(first) == grown.cells.content(second) == DIGEST
    assert grown.cache.used == 22
    for sequence in (first, second):
        grown.cache.close(sequence, "prompt")
    assert grown.cache.used == 20


@pytest.mark.parametrize("template", [[], [1, 2, 3]])
def test_prompts_with_nothing_in_common_leave_one_tail(template: list[int]) -> None:
    grown = Grown()
    for first in (10, 40, 70):
        prompt = [*template, *range(first, first + 25)]
        grown.leave(prompt, answer=(5, 5))
        assert grown.cache.used == grown.cached(prompt) == len(prompt)


@pytest.mark.parametrize(
    ("waiting", "stays"),
    [
        ([], False),
        ([[*DIGEST, 1, 1, 9]], True),
        ([[*DIGEST, 1, 9]], True),
        ([[*DIGEST, 1]], False),  # its last token is computed anyway
        ([[*DIGEST, 4, 4], DIGEST, DIGEST[:5], [7]], False),
        ([[*DIGEST[:19], 5, 1, 1, 9]], False),  # goes another way
        ([[*DIGEST, 4], [*DIGEST, 1, 8]], True),
    ],
)
def test_a_tail_that_a_waiting_prompt_begins_with_stays_too(waiting: list[list[int]], stays: bool) -> None:
    grown = Grown()
    grown.leave([*DIGEST, 1, 1, 1])
    second = grown.open([*DIGEST, 2, 2])
    grown.cache.close(second, "prompt", wanted=[as_tokens(prompt) for prompt in waiting])
    assert grown.cached([*DIGEST, 1, 1, 1]) == (23 if stays else 20)
    assert grown.cached([*DIGEST, 2, 2]) == 22
    grown.leave([*DIGEST, 3])
    assert grown.cache.used == 21, "nobody waits any more"


def test_a_paused_sequence_goes_on_in_its_own_place() -> None:
    grown = Grown()
    sequence = grown.open([*DIGEST, 1])
    grown.answer(sequence, [5, 6])
    grown.cache.pause(sequence)
    for tail in (2, 3):
        grown.leave([*DIGEST, tail])
    assert grown.cached([*DIGEST, 1, 5, 6]) == 23, "it is no tail that others may replace"
    copies = len(grown.cells.copies)
    assert grown.cache.open([*DIGEST, 1, 5, 6, 7]) == OpenedSequence(sequence, 23)
    assert len(grown.cells.copies) == copies
    grown.cache.close(sequence, "prompt", prompt_tokens=21)
    assert grown.cache.used == 21, "nothing of the answer is left"


def test_what_is_left_of_a_paused_sequence_is_taken_over_as_well() -> None:
    grown = Grown(cells=30)
    sequence = grown.open([*DIGEST, 1, 1])
    grown.cache.pause(sequence)
    assert grown.cache.make_room(15)
    assert grown.cache.open([*DIGEST, 1, 1, 1]) == OpenedSequence(sequence, 15)


def test_a_paused_sequence_that_is_not_resumed() -> None:
    grown = Grown()
    first, second = grown.open([*DIGEST, 1]), grown.open([*DIGEST, 2])
    grown.cache.release_paused([*DIGEST, 1])
    assert grown.cache.used == 22, "it runs"
    grown.cache.pause(first)
    grown.cache.release_paused([*DIGEST, 3])
    assert grown.cache.used == 22, "another one"
    grown.cache.release_paused([*DIGEST, 1, 5])
    assert grown.cache.used == grown.cached([*DIGEST, 2]) == 21
    grown.cache.pin(DIGEST)
    grown.cache.pause(second)
    grown.cache.release_paused([*DIGEST, 2, 5])
    assert grown.cache.used == 20
