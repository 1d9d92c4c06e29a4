"""What batch work leaves behind: heads that were shared stay, tails go."""

from support.kv_cells import Grown

DIGEST = list(range(100, 120))


def test_a_batch_tail_off_a_fork_is_dropped_at_once() -> None:
    grown = Grown()
    first, second = grown.open([*DIGEST, 1, 1]), grown.open([*DIGEST, 2, 2])
    grown.answer(first, [5, 5])
    grown.forest.close(first, "prompt")
    assert grown.forest.used == 20 + 2
    grown.forest.close(second, "prompt")
    assert grown.forest.used == grown.cached([*DIGEST, 2, 2]) == 20


def test_dropping_a_tail_costs_one_cut() -> None:
    grown = Grown()
    for tail in (1, 2):
        grown.leave([*DIGEST, tail, tail])
    sequence = grown.open([*DIGEST, 3, 3])
    cuts = len(grown.cells.cuts)
    grown.forest.close(sequence, "prompt")
    assert len(grown.cells.cuts) == cuts + 1


def test_also_where_the_other_branch_is_gone() -> None:
    grown = Grown()
    for tail in (1, 2, 3):
        grown.leave([*DIGEST, tail, tail])
    assert grown.forest.used == 20


def test_an_unbranched_path_stays_whole_until_a_second_sequence_splits_it() -> None:
    grown = Grown()
    grown.leave([*DIGEST, 1, 1])
    assert grown.forest.used == 22
    sequence = grown.open([*DIGEST, 2], compute=0)
    assert grown.forest.used == 20
    assert grown.cells.content(sequence) == DIGEST


def test_a_longer_prompt_over_the_same_path_is_no_fork() -> None:
    grown = Grown()
    grown.leave(DIGEST)
    grown.leave([*DIGEST, 1, 1])
    assert grown.forest.used == 22
    grown.leave([*DIGEST, 1, 1, 1])
    assert grown.forest.used == 23


def test_a_fork_made_by_an_answer_drops_the_tail_too() -> None:
    grown = Grown()
    first = grown.open(DIGEST)
    grown.leave([*DIGEST, 1, 1])
    assert grown.forest.used == 22
    grown.answer(first, [2])
    assert grown.forest.used == 21
    third = grown.open([*DIGEST, 3])
    grown.forest.close(first, "nothing")
    grown.forest.close(third, "prompt")
    assert grown.forest.used == 20, "the fork is remembered"


def test_a_fork_within_an_answer_is_no_fork_of_the_prompt() -> None:
    grown = Grown()
    first = grown.open(DIGEST)
    grown.answer(first, [1, 2, 3])
    second = grown.open([*DIGEST, 1, 2, 9])
    grown.forest.close(first, "prompt")
    grown.forest.close(second, "nothing")
    assert grown.forest.used == 20


def test_a_fork_that_was_trimmed_away_is_forgotten() -> None:
    grown = Grown(cells=30)
    for tail in (1, 2):
        grown.leave([*DIGEST, tail])
    assert grown.forest.room(20)
    assert grown.cached(DIGEST) == 10
    grown.leave([*DIGEST[:10], 5, 5])
    assert grown.forest.used == 12


def test_a_sequence_that_took_a_keepers_place_does_not_move_the_fork() -> None:
    grown = Grown(sequences=2)
    for tail in (1, 2):
        grown.leave([*DIGEST, tail])
    grown.open([7])
    grown.leave([*DIGEST, 3, 3])
    assert grown.forest.used == 20 + 1


def test_a_sequence_that_came_no_further_than_the_fork_keeps_it() -> None:
    grown = Grown(sequences=2)
    for tokens in ([*DIGEST, 1], [*DIGEST, 2], [*DIGEST[:10], 3]):
        grown.leave(tokens)
    grown.open([7])
    sequence = grown.open([*DIGEST, 3, 3], compute=0)
    grown.forest.close(sequence, "prompt")
    assert grown.forest.used == 20 + 1


def test_a_head_is_kept_though_a_running_sequence_holds_it_too() -> None:
    grown = Grown()
    first, second = grown.open(DIGEST), grown.open([*DIGEST, 1])
    grown.forest.close(first, "prompt")
    grown.forest.close(second, "nothing")
    assert grown.forest.used == 20


def test_the_tail_of_a_chat_stays_beyond_a_fork() -> None:
    grown = Grown()
    grown.leave([*DIGEST, 1, 1], "all", answer=(5, 6))
    grown.leave([*DIGEST, 2, 2], "all", answer=(7,))
    grown.leave([*DIGEST, 3, 3])
    assert grown.forest.used == 20 + 4 + 3
    assert grown.cached([*DIGEST, 1, 1, 5, 6]) == 24


def test_a_running_tail_beyond_the_split_stays() -> None:
    grown = Grown()
    first = grown.open([*DIGEST, 1, 1])
    grown.leave([*DIGEST, 2, 2])
    assert grown.cells.content(first) == [*DIGEST, 1, 1]
    assert grown.forest.used == 22


def test_a_head_that_was_shared_outlives_a_fork_before_it() -> None:
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
    assert grown.forest.used == 18


def test_the_same_prompt_twice_costs_one_token() -> None:
    grown = Grown()
    for used in (20, 19, 19):
        grown.leave(DIGEST)
        assert grown.forest.used == used
    first, second = grown.open(DIGEST), grown.open(DIGEST)
    assert grown.cells.content(first) == grown.cells.content(second) == DIGEST
    assert grown.forest.used == 21
