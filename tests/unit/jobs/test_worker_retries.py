"""What an error means for a job, and how suspects are tried."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.process.exit_status import Exit, engine_from_outside
from tokenmill.errors import (
    EngineDied,
    EngineError,
    EngineTimeout,
    RequestRefused,
    TokenmillError,
    TooLong,
)
from tokenmill.jobs.models import Failure
from tokenmill.jobs.scheduler.crash_isolation import FURTHER_TOKENS, CrashIsolation
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.worker.retries import MAX_DELAY_S, classify, delay_s, final_failure, max_consecutive_failures


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (TooLong("9000 tokens do not fit", needed_tokens=9000, context_tokens=8192), "too_long", False),
        (RequestRefused("no such thing"), "refused", False),
        (EngineTimeout("not done within 5 s"), "timeout", True),
        (EngineDied("it died"), "engine_died", True),
        (EngineError("the server failed (500)"), "engine_failed", True),
        (TokenmillError("something else"), "failed", False),
    ],
)
def test_only_what_can_pass_is_tried_again(error: TokenmillError, code: str, retryable: bool) -> None:
    found = classify(error)
    assert (found.failure.code, found.retryable) == (code, retryable)
    assert error.message in found.failure.message


def test_too_long_says_by_how_much_once() -> None:
    plain = TooLong("9000 tokens do not fit a context of 8192", needed_tokens=9000, context_tokens=8192)
    assert "808 tokens too many" in classify(plain).failure.message
    said = TooLong("9000 of 8192: 808 too many", needed_tokens=9000, context_tokens=8192)
    assert classify(said).failure.message.count("808") == 1
    # "1" stands in both numbers, and a server that only counts the prompt has no room for an answer left
    for needed in (512, 513):
        edge = TooLong(f"{needed} tokens do not fit a context of 512", needed_tokens=needed, context_tokens=512)
        assert "(1 token too many)" in classify(edge).failure.message


def test_a_hint_belongs_to_the_message_but_a_page_of_a_log_does_not() -> None:
    assert classify(EngineTimeout("late", hint="give it more time")).failure.message == "late; give it more time"
    assert "last words" not in classify(EngineDied("dead", hint="its last words: ...")).failure.message


def test_attempts_are_told_when_there_were_several() -> None:
    failure = Failure("timeout", "late")
    assert final_failure(failure, 1) is failure
    assert final_failure(failure, 3).message == "late; tried 3 times"


@given(attempts=st.integers(1, 40), chance=st.floats(0, 1, exclude_max=True))
def test_waiting_doubles_is_spread_and_has_an_end(attempts: int, chance: float) -> None:
    found = delay_s(attempts, chance, 2.0)
    middle = min(MAX_DELAY_S, 2.0 * 2 ** (attempts - 1))
    assert 0.5 * middle <= found <= 1.5 * middle


@pytest.mark.parametrize(
    ("exit_", "outside"),
    [
        (Exit(signal=signal.SIGKILL, kills={"system": 0}), True),
        (Exit(signal=signal.SIGKILL), None),  # by another process or by the OOM killer
        (Exit(code=128 + signal.SIGKILL, kills={"system": 0}), True),
        (Exit(code=128 + signal.SIGTERM), True),
        (Exit(signal=signal.SIGTERM), True),
        (Exit(signal=signal.SIGHUP), True),
        (Exit(supervisor_signal=signal.SIGKILL), True),
        (Exit(), None),
        (Exit(code=0), None),
        (Exit(asked=True), True),
        (Exit(signal=signal.SIGKILL, kernel="Out of memory: Killed process 1"), False),
        (Exit(signal=signal.SIGKILL, kills={"cgroup": 1}), False),
        (Exit(signal=signal.SIGSEGV), False),
        (Exit(signal=signal.SIGABRT), False),
        (Exit(code=1), False),
    ],
)
def test_a_death_from_outside_is_told_from_one_that_work_may_have_caused(exit_: Exit, outside: bool | None) -> None:
    assert exit_.from_outside is outside


@pytest.mark.parametrize(("kind", "outside"), [("native", True), ("llama-server", True), ("vllm", None)])
def test_only_vllm_exits_cleanly_without_being_told_to(kind: str, outside: bool | None) -> None:
    assert engine_from_outside(Exit(code=0), kind) is outside
    assert engine_from_outside(Exit(signal=signal.SIGSEGV), kind) is False
    assert engine_from_outside(None, kind) is None


def test_the_engine_is_at_fault_after_as_many_failures_as_no_batch_of_bad_jobs_has() -> None:
    assert max_consecutive_failures(1) == max_consecutive_failures(4) == 12
    assert max_consecutive_failures(64) == 192


def record(job: int) -> Pending:
    return Pending(job, b"head", 100)


def test_suspects_are_tried_one_at_a_time_and_the_next_when_one_has_come_further() -> None:
    suspects = CrashIsolation()
    for job in (1, 2):
        suspects.add_suspect(record(job), tokens=10)
    assert suspects.try_next({7}) is None  # somebody else is at work
    assert suspects.try_next(()) == record(1)
    assert suspects.try_next({1}) is None
    assert not suspects.advanced(1, 10 + FURTHER_TOKENS - 1)
    assert suspects.advanced(1, 10 + FURTHER_TOKENS)
    assert suspects.try_next({1}) == record(2)
    suspects.ended(2)
    assert not suspects.trying


def test_a_suspect_from_another_run_is_cleared_by_its_end_alone() -> None:
    suspects = CrashIsolation()
    suspects.add_suspect(record(1), tokens=None)
    suspects.try_next(())
    assert not suspects.advanced(1, 10**6)
    suspects.ended(1)
    assert not suspects.trying


def test_a_suspect_whose_trial_is_interrupted_is_tried_again_up_to_the_same_point() -> None:
    suspects = CrashIsolation()
    suspects.add_suspect(record(1), tokens=50)
    assert not suspects.retry(record(2), tokens=3)  # no suspect
    suspects.try_next(())
    assert suspects.retry(record(1), tokens=3)
    assert suspects.on_trial is None
    assert suspects.try_next(()) == record(1)
    assert not suspects.advanced(1, 50 + FURTHER_TOKENS - 1)
    assert suspects.advanced(1, 50 + FURTHER_TOKENS)


def test_whoever_is_accused_again_waits_again() -> None:
    suspects = CrashIsolation()
    for job in (1, 2, 3):
        suspects.add_suspect(record(job), tokens=0)
    suspects.try_next(())
    suspects.advanced(1, FURTHER_TOKENS)
    suspects.try_next({1})  # the engine dies with 1, cleared, and 2, on trial
    for job in (1, 2):
        suspects.add_suspect(record(job), tokens=20)
    assert suspects.on_trial is None
    assert [suspects.try_next(()), suspects.try_next({3})] == [record(3), None]
    suspects.dropped([1, 2, 3])
    assert not suspects.trying
