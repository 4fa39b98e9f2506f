"""The page against the real server: a conversation, and a worker that is killed and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from server_harness import running_server

from worker_harness import running_worker

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

QUESTION = "What is a duck?"


def test_a_conversation_goes_on_when_a_worker_is_killed_and_comes_back(
    new_page: Callable[..., Page], tmp_path: Path, demo_folder: Path
) -> None:
    page = new_page(viewport={"width": 1280, "height": 900})
    with ExitStack() as stack:
        workers = [stack.enter_context(running_worker(tmp_path, token="secret")) for _ in range(2)]
        addresses = ",".join(str(worker.address) for worker in workers)
        variables = [("DUCKLLM_CLUSTER_TOKEN", "secret"), ("DUCKLLM_API_KEY", "the-key")]
        server = stack.enter_context(
            running_server(tmp_path / "stderr", "--workers", addresses, variables=variables)
        )
        body = {"messages": [{"role": "user", "content": QUESTION}]}
        headers = {"authorization": "Bearer the-key"}
        answer = server.http.post("/v1/chat/completions", json=body, headers=headers).json()
        [text] = [choice["message"]["content"] for choice in answer["choices"]]
        assert "web-footed" in text

        page.goto(server.url)
        page.get_by_label("Key", exact=True).fill("the-key")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("demo, 4,096 tokens of context")
        page.keyboard.press("Alt+p")
        expect(page.get_by_label("Temperature", exact=True)).to_have_attribute("placeholder", "0")
        expect(page.get_by_label("Thinking", exact=True)).to_be_hidden()
        page.keyboard.press("Escape")
        ask(page, QUESTION)
        replies = page.locator(".message.assistant > .prose")
        expect(page.locator(".facts").first).to_contain_text(f"{answer['usage']['completion_tokens']} tokens")
        lines = text.strip().splitlines()
        for line in lines:
            expect(replies.first).to_contain_text(line)

        os.kill(workers[1].pid, signal.SIGKILL)
        ask(page, "What was my first question?")
        page.get_by_role("link", name="Cluster").click()
        alert = page.get_by_role("alert")
        expect(alert).to_have_text(
            f"Worker 1 ({workers[1].address}) lost. Replies wait until it is back or replaced."
        )
        rows = page.locator(".workers tbody tr")
        expect(rows.locator(".state")).to_have_text(["working", "lost"])
        expect(page.locator(".heat-value")).to_be_visible()

        stack.enter_context(running_worker(tmp_path, "--listen", str(workers[1].address), token="secret"))
        expect(rows.locator(".state")).to_have_text(["working", "back again"], timeout=20_000)
        expect(rows.nth(1).locator("td").last).to_contain_text("1")
        expect(alert).to_have_count(0)
        expect(page.locator(".events li").first).to_contain_text("Worker 1 is back")
        page.get_by_role("link", name=QUESTION).click()
        expect(replies.nth(1)).to_have_text(QUESTION)
        assert server.stop() == 0


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
