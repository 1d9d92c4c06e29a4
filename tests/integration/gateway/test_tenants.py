"""Clients with different keys: nothing of one is visible to another, and none takes all the capacity."""

import time
from pathlib import Path
from typing import Any

import openai
import pytest

from support import patient
from support.batches import created, lines_of, prompt_line, until, uploaded
from support.gateway import Served
from support.gateway_clients import ask, faked
from tokenmill.gateway import app
from tokenmill.gateway.batches import routes
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.http import keys
from tokenmill.gateway.http.keys import KeyLimits
from tokenmill.gateway.http.token_budget import DAY_S, TokenBudget


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "extra_groups", lambda one: (routes.route_group(one, BatchService(one, 0.05)),))


def finished(client: Any, *lines: str) -> Any:
    return until(client, created(client, *lines), "completed")


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def reload_keys(gateway: Served) -> None:
    """Make the gateway read the file of keys now, and not within a second."""
    gateway.state.keys._checked_s = float("-inf")


def test_a_stored_answer_is_not_given_to_another_key(tmp_path: Path) -> None:
    ann, bob = keys.add(tmp_path, "ann"), keys.add(tmp_path, "bob")
    with faked(tmp_path) as (gateway, engine):
        first, other = gateway.client(ann), gateway.client(bob)
        assert finished(first, prompt_line("a", "secret")).usage.output_tokens == 4
        assert finished(first, prompt_line("a", "secret")).usage.output_tokens == 0
        again = finished(other, prompt_line("a", "secret"))
        assert again.usage.output_tokens == 4
        assert engine.seen.streams == ["secret", "secret"]
        assert len(lines_of(other, again.output_file_id)) == 1


def test_answers_are_shared_if_the_configuration_says_so(tmp_path: Path) -> None:
    ann, bob = keys.add(tmp_path, "ann"), keys.add(tmp_path, "bob")
    with faked(tmp_path, share_answers=True) as (gateway, engine):
        finished(gateway.client(ann), prompt_line("a", "public"))
        assert finished(gateway.client(bob), prompt_line("a", "public")).usage.output_tokens == 0
        assert engine.seen.streams == ["public"]


def test_a_new_key_does_not_inherit_the_files_of_a_revoked_one_of_the_same_name(tmp_path: Path) -> None:
    before = keys.add(tmp_path, "ann")
    with faked(tmp_path) as (gateway, engine):
        client = gateway.client(before)
        batch = finished(client, prompt_line("a", "secret"))
        keys.revoke(tmp_path, "ann")
        after = keys.add(tmp_path, "ann")
        reload_keys(gateway)
        new = gateway.client(after)
        assert new.files.list().data == []
        assert new.batches.list().data == []
        with pytest.raises(openai.NotFoundError):
            new.files.content(batch.output_file_id)
        with pytest.raises(openai.NotFoundError):
            new.batches.retrieve(batch.id)
        assert finished(new, prompt_line("a", "secret")).usage.output_tokens == 4
        assert engine.seen.streams == ["secret", "secret"]


def test_a_key_file_of_an_older_version_keeps_its_files(tmp_path: Path) -> None:
    secret = keys.add(tmp_path, "ann")
    path = keys.path_in(tmp_path)
    stored = keys.read(tmp_path)[0]
    path.write_text(path.read_text().replace(f'"id": "{stored.id}"', '"id": ""'))
    with faked(tmp_path) as (gateway, _):
        file = uploaded(gateway.client(secret), prompt_line("a", "x"))
        shown = patient.get(f"{gateway.url}/v1/files/{file.id}", headers=bearer(secret))
        assert shown.status_code == 200
        assert keys.read(tmp_path)[0].owner == "ann"


def test_revoking_the_last_key_does_not_open_the_gateway(tmp_path: Path) -> None:
    secret = keys.add(tmp_path, "ann")
    with faked(tmp_path) as (gateway, _):
        assert ask(gateway, "a", headers=bearer(secret)).status_code == 200
        keys.revoke(tmp_path, "ann")
        reload_keys(gateway)
        for headers in (None, bearer(secret)):
            refused = ask(gateway, "a", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    with faked(tmp_path) as (gateway, _):  # nor does a restart
        assert ask(gateway, "a").status_code == 401
        keys.path_in(tmp_path).unlink()
        reload_keys(gateway)
        assert ask(gateway, "a").status_code == 200


def test_tokens_of_a_day_limit_requests_and_survive_a_restart(tmp_path: Path) -> None:
    secret = keys.add(tmp_path, "ann", KeyLimits(tokens_per_day=20))
    other = keys.add(tmp_path, "bob")
    with faked(tmp_path) as (gateway, _):
        assert ask(gateway, "0123456789abcdef", headers=bearer(secret)).status_code == 200  # 16 + 4 tokens
        refused = ask(gateway, "a", headers=bearer(secret))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "daily_tokens_exceeded")
        assert 0 < int(refused.headers["retry-after"]) <= DAY_S
        assert ask(gateway, "a", headers=bearer(other)).status_code == 200
    with faked(tmp_path) as (gateway, _):
        assert ask(gateway, "a", headers=bearer(secret)).status_code == 429


def test_batches_count_and_wait_for_the_next_day(tmp_path: Path) -> None:
    secret = keys.add(tmp_path, "ann", KeyLimits(tokens_per_day=50))
    with faked(tmp_path, slots=1) as (gateway, _):
        client = gateway.client(secret)
        batch = created(client, *(prompt_line(str(number), f"{number:06}") for number in range(30)))  # 10 tokens each
        stopped = until(client, batch, "in_progress", done=5)
        end = time.monotonic() + patient.LIMIT_S
        while not any(line.get("event") == "batches_wait" for line in gateway.lines):
            assert time.monotonic() < end
            time.sleep(0.02)
        counted = client.batches.retrieve(batch.id).request_counts
        assert stopped.status == "in_progress"
        assert 5 <= counted.completed < 30
        assert ask(gateway, "a", headers=bearer(secret)).status_code == 429

        budget = gateway.state.limiter.budget
        assert budget is not None
        assert budget.used(keys.read(tmp_path)[0].owner) >= 50
        day = budget.clock() + DAY_S
        budget.clock = lambda: day
        while counted.completed < 8:  # the new day's tokens are enough for five more
            assert time.monotonic() < end
            counted = client.batches.retrieve(batch.id).request_counts


def test_a_second_owner_is_not_starved_by_a_long_batch(tmp_path: Path) -> None:
    ann, bob = keys.add(tmp_path, "ann"), keys.add(tmp_path, "bob")
    with faked(tmp_path, in_order=True, slots=2) as (gateway, _):
        first, second = gateway.client(ann), gateway.client(bob)
        long = created(first, *(prompt_line(str(number), f"steady a{number}") for number in range(60)))
        long = until(first, long, "in_progress", done=4)
        before = long.request_counts.completed
        short = until(second, created(second, *(prompt_line(str(n), f"steady b{n}") for n in range(6))), "completed")
        after = first.batches.retrieve(long.id).request_counts.completed
        assert short.request_counts.completed == 6
        assert after < 60
        assert after > before  # nor does the short batch stop the long one
        until(first, long, "completed")


def test_tokens_of_a_day_are_forgotten_at_midnight(tmp_path: Path) -> None:
    now_s = 10 * DAY_S + 5.0
    budget = TokenBudget.of(tmp_path, lambda: now_s)
    budget.charge("ann", 70)
    budget.save()
    again = TokenBudget.of(tmp_path, lambda: now_s)
    assert (again.used("ann"), again.used("bob")) == (70, 0)
    assert again.wait_s("ann", 70) == DAY_S - 5.0
    assert (again.wait_s("ann", 71), again.wait_s("ann", None)) == (0.0, 0.0)
    now_s += DAY_S
    assert again.used("ann") == 0
    (tmp_path / "gateway" / "tokens.json").write_text("{")
    assert TokenBudget.of(tmp_path, lambda: now_s).used("ann") == 0
