"""Take the pictures of the dashboard in docs/img: light, dark, on a phone, and after the engine was killed.

    .venv/bin/python scripts/screenshots.py [FOLDER]

Starts `tokenmill serve smollm2` with a state folder of its own, submits a batch of real jobs and opens the dashboard in
Chromium (scripts/browser.sh). The picture of the report is made by docs/sample-report/make.sh.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
WIDE, PHONE = (1280, 900), (390, 844)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
THINGS = ("printer", "keyboard", "router", "screen", "mouse", "cable", "phone", "charger", "scanner", "server")
RULES = "You sort support tickets. Answer with the department and one sentence that says what to do next. "
TEXTS = {"billing": RULES + "This ticket is about an invoice. ", "hardware": RULES + "This ticket is about a device. "}


def main() -> None:
    """Take all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img"
    folder.mkdir(parents=True, exist_ok=True)
    browser = subprocess.run(
        [ROOT / "scripts" / "browser.sh"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as state, served(Path(state)) as url:
        client = httpx.Client(base_url=url, timeout=120)
        submit(client, "tickets-monday.jsonl", lines(4, 4))
        wait_for_batches(client)
        submit(client, "no-batch.jsonl", ["this is not JSON"])
        submit(client, "tickets-tuesday.jsonl", lines(40, 24))
        wait_until_begun(client)
        with sync_playwright() as playwright:
            opened = playwright.chromium.launch(executable_path=browser, args=FLAGS)
            take(opened, url, folder / "dashboard-light.png", WIDE, "light", talk=True)
            take(opened, url, folder / "dashboard-dark.png", WIDE, "dark")
            take(opened, url, folder / "dashboard-phone.png", PHONE, "light")
            take_death(opened, url, folder / "dashboard-death.png")
            opened.close()


@contextmanager
def served(state: Path) -> Iterator[str]:
    """A gateway with smollm2; yields its address."""
    words = ["serve", "smollm2", "--context", "2048", "--sequences", "8", "--port", "0", "--no-point"]
    env = os.environ | {"XDG_STATE_HOME": str(state), "NO_COLOR": "1", "COLUMNS": "200"}
    log = (state / "serve.log").open("wb")
    process = subprocess.Popen([sys.executable, "-m", "tokenmill", *words], env=env, stdout=log, stderr=log)
    try:
        yield _address(process, state / "serve.log")
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end_s = time.monotonic() + 180
    while time.monotonic() < end_s and process.poll() is None:
        found = re.search(r"url\s+(http://\S+)/v1", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.2)
    raise SystemExit(f"the gateway did not start:\n{log.read_text(errors='replace')[-2000:]}")


def lines(jobs: int, max_tokens: int) -> list[str]:
    """Jobs with two shared prefixes."""
    made = []
    for number in range(jobs):
        kind = "billing" if number % 3 == 0 else "hardware"
        said = f"Ticket {number}: my {THINGS[number % len(THINGS)]} stopped working after the move to room {number}."
        messages = [{"role": "system", "content": TEXTS[kind] * 6}, {"role": "user", "content": said}]
        body = {"model": "smollm2", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        line = {"custom_id": f"{kind}-{number:04}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        made.append(json.dumps(line))
    return made


def submit(client: httpx.Client, name: str, jobs: list[str]) -> None:
    """Start a batch."""
    data = "".join(f"{line}\n" for line in jobs).encode()
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, data)}).json()["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    client.post("/v1/batches", json=wanted).raise_for_status()


def wait_for_batches(client: httpx.Client) -> None:
    """Wait until no batch is open."""
    while any(batch["status"] not in ("completed", "failed") for batch in client.get("/v1/batches").json()["data"]):
        time.sleep(0.5)


def wait_until_begun(client: httpx.Client) -> None:
    """Wait until some jobs of the newest batch are answered."""
    while True:
        counts = client.get("/v1/batches").json()["data"][0]["request_counts"]
        if counts["completed"] >= 2:
            return
        time.sleep(0.5)


def take(browser: Browser, url: str, path: Path, size: tuple[int, int], scheme: str, *, talk: bool = False) -> None:
    """A picture of the whole page after it has received some seconds of events."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=2 if size == PHONE else 1,
    )
    context.set_default_timeout(300_000)
    page = context.new_page()
    page.goto(url)
    page.locator(".batch .progress").first.wait_for()
    page.locator(".slot[data-doing]").first.wait_for()
    if talk:
        page.fill("#words", "Which department repairs a printer?")
        page.click("#send")
        page.locator(".said:not(.user)").first.wait_for()
    page.wait_for_timeout(6000)
    page.screenshot(path=path, full_page=True)
    context.close()


def take_death(browser: Browser, url: str, path: Path) -> None:
    """A picture of the top of the page while a killed engine restarts."""
    page: Page = browser.new_page(viewport={"width": WIDE[0], "height": 460})
    page.set_default_timeout(300_000)
    page.goto(url)
    page.locator(".batch .progress").first.wait_for()
    page.wait_for_timeout(3000)
    for child in psutil.Process().children(recursive=True):
        words = " ".join(child.cmdline())
        if "tokenmill.native.worker" in words and "supervisor" not in words:
            child.kill()
    page.locator("#banner:not([hidden])").wait_for()
    page.screenshot(path=path)
    page.close()


if __name__ == "__main__":
    main()
