"""The dashboard in a real Chromium with a real engine: a batch, a concurrent chat, and a killed engine."""

import json
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect

from support.chromium import Opened, chromium, opened
from support.fake_engine import FakeEngine
from support.gateway import Served, config_in, fake_engines, native_engine, served
from support.gateway_clients import until
from tokenmill.engine.engine import Answer, Chat, Piece, Request
from tokenmill.gateway.http import keys

JOBS = 12
# What the page shows from now on, every change of it.
KEEP_STATES = """() => {
  const [state, banner] = ['#state', '#banner'].map((one) => document.querySelector(one));
  window.shown = {states: [], banners: []};
  const note = () => { shown.states.push(state.dataset.state); shown.banners.push(banner.textContent); };
  const watched = new MutationObserver(note);
  for (const one of [state, banner])
    watched.observe(one, {attributes: true, childList: true, characterData: true, subtree: true});
}"""
HEAD = "You look after a mill by the river. Say one short thing about the grain that you are asked about. " * 4


class Talking(FakeEngine):
    """A chat's last message decides what it does."""

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        assert isinstance(request.prompt, Chat)
        words = replace(request, prompt=request.prompt.messages[-1]["content"])
        async with aclosing(super().stream(words)) as events:
            async for event in events:
                yield event


@contextmanager
def talking(folder: Path) -> Iterator[tuple[Served, FakeEngine]]:
    made: list[FakeEngine] = []

    def make() -> list[tuple[str, FakeEngine]]:
        made.append(Talking())
        return [("fake", made[0])]

    with served(fake_engines(make), config_in(folder)) as gateway:
        yield gateway, made[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = config_in(tmp_path_factory.mktemp("state"))
    with served(native_engine(smollm2_path, context=512, sequences=2), config) as one:
        yield one


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jobs") / "grains.jsonl"
    path.write_text("".join(map(line, range(JOBS))), encoding="utf-8")
    return path


def line(number: int) -> str:
    asked = [{"role": "system", "content": HEAD}, {"role": "user", "content": f"Grain number {number}?"}]
    body = {"model": "smollm2", "messages": asked, "max_tokens": 16, "temperature": 0}
    job = {"custom_id": f"grain-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(job) + "\n"


def ready(one: Opened) -> None:
    expect(one.page.locator("#state")).to_have_attribute("data-state", "ok")


def say(one: Opened, words: str) -> None:
    one.page.locator("#words").fill(words)
    one.page.locator("#send").click()


def test_a_batch_a_concurrent_chat_and_a_death(browser: Browser, gateway: Served, jobs: Path) -> None:
    with opened(browser, gateway.url) as one:
        page = one.page
        ready(one)
        page.locator("#file").set_input_files(jobs)
        page.locator("#start").click()
        batch = page.locator(".batch")
        expect(batch.locator(".pill")).to_have_text("in progress")
        expect(batch.locator(".name")).to_have_text("grains.jsonl")

        expect(page.locator(".slot[data-doing=answer], .slot[data-doing=prompt]").first).to_be_visible()
        expect(page.locator(".slot[data-doing] .tag").first).to_contain_text("grain-")
        assert page.evaluate(
            "document.querySelector('#batches').compareDocumentPosition(document.querySelector('#talk')) & 4"
        )
        say(one, "What is a mill?")
        expect(page.locator(".stats")).to_contain_text("tokens")
        expect(page.locator(".said.assistant > span").first).not_to_be_empty()

        expect(batch.locator(".pill")).to_have_text("completed")
        expect(batch).to_contain_text(f"{JOBS} of {JOBS} jobs answered")
        with page.expect_download() as saved:
            batch.get_by_text("Results").click()
        answers = Path(saved.value.path()).read_text(encoding="utf-8").splitlines()
        assert {json.loads(answer)["custom_id"] for answer in answers} == {f"grain-{at}" for at in range(JOBS)}
        expect(page.locator("#prefixes .hits").first).to_contain_text("hit")
        expect(page.locator("#prefixes q", has_text="look after a mill").first).to_be_visible()
        expect(page.locator("#reuse")).to_contain_text("%")
        assert page.locator("[data-tier=host] [data-item]").evaluate_all(
            "parts => [...new Set(parts.map(part => part.dataset.item))].sort()"
        ) == ["compute", "free", "kv", "other", "weights"]

        pid = gateway.state.backends[0].engine.identity.pid
        assert pid is not None
        page.evaluate(KEEP_STATES)  # one may be over before anybody looks
        os.kill(pid, signal.SIGKILL)
        expect(page.locator("#banner")).to_contain_text("is back")
        ready(one)
        shown = page.evaluate("window.shown")
        assert "down" in shown["states"]
        assert any("killed by SIGKILL" in words for words in shown["banners"])
        expect(page.locator("#events")).to_contain_text("killed by SIGKILL")
        assert one.complaints == []
        assert {url.partition("://")[2].partition("/")[0] for url in one.requests} == {f"127.0.0.1:{gateway.port}"}


def test_cancelling(browser: Browser, gateway: Served, tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text("".join(map(line, range(1000, 1400))), encoding="utf-8")
    with opened(browser, gateway.url) as one:
        ready(one)
        one.page.locator("#file").set_input_files(many)
        one.page.locator("#start").click()
        batch = one.page.locator(".batch").filter(has_text="many.jsonl")
        batch.get_by_role("button", name="Cancel").click()
        expect(batch.locator(".pill")).to_have_text("cancelled")
        expect(batch.get_by_role("button", name="Cancel")).to_have_count(0)
        assert one.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(browser: Browser, gateway: Served, scheme: Literal["light", "dark"]) -> None:
    with opened(browser, gateway.url, scheme=scheme) as one:
        ready(one)
        expect(one.page.locator("#batches > *").first).to_be_visible()
        for width in (1280, 700, 390, 320):
            one.page.set_viewport_size({"width": width, "height": 900})
            assert not one.overflows, width
            worst = one.worst_contrasts()
            assert worst[0][0] >= 4.5, (width, worst)
        assert one.complaints == []


def test_a_file_that_is_no_batch(browser: Browser, gateway: Served, tmp_path: Path) -> None:
    wrong = tmp_path / "<b>wrong<b>.jsonl"
    wrong.write_text("this is no JSON\n", encoding="utf-8")
    with opened(browser, gateway.url) as one:
        ready(one)
        one.page.locator("#file").set_input_files(wrong)
        one.page.locator("#start").click()
        batch = one.page.locator(".batch").filter(has_text="wrong")
        expect(batch.locator(".pill")).to_have_text("failed")
        expect(batch.locator(".bad")).to_contain_text("line 1")
        expect(batch.locator(".name")).to_have_text("<b>wrong<b>.jsonl")  # as text
        assert one.worst_contrasts()[0][0] >= 4.5


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    key = keys.add(tmp_path, "me")
    with talking(tmp_path) as (gateway, _), opened(browser, gateway.url, width=390) as one:
        page = one.page
        expect(page.locator("#ask-key")).to_be_visible()
        assert not any("/api/" in url for url in one.requests)
        page.locator("#key").fill(key)
        page.get_by_text("Use it").click()
        ready(one)
        say(one, "hello")
        expect(page.locator(".stats")).to_contain_text("4 tokens")
        expect(page.locator(".stats")).to_contain_text("by fake")
        expect(page.locator("#misses .empty")).to_be_visible()
        page.reload()
        ready(one)
        assert page.evaluate("Object.keys(localStorage).length") == 0
        assert page.evaluate("document.cookie") == ""
        assert one.complaints == []


def test_a_wrong_key_is_asked_for_again(browser: Browser, tmp_path: Path) -> None:
    keys.add(tmp_path, "me")
    with talking(tmp_path) as (gateway, _), opened(browser, gateway.url) as one:
        one.page.locator("#key").fill("tm-wrong")
        one.page.get_by_text("Use it").click()
        expect(one.page.locator("#key-wrong")).to_be_visible()


def test_a_gateway_that_stops_is_reported(browser: Browser, tmp_path: Path) -> None:
    with talking(tmp_path) as (gateway, engine), opened(browser, gateway.url) as one:
        ready(one)
        say(one, "slow")
        until(lambda: bool(engine.at_work))
        one.page.locator("#halt").click()
        until(lambda: not engine.at_work)  # the slot is free
        expect(one.page.locator(".said.assistant")).to_contain_text("stopped")
        gateway.tell_to_stop()
        expect(one.page.locator("#banner")).to_contain_text("does not answer")
        expect(one.page.locator("#state")).to_have_attribute("data-state", "lost")
