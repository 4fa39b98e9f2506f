"""The page without a mouse, on small screens, and for those who hear it or see little contrast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.cluster_answers import cluster_answer
from support.page_server import Gate, PageServer, Thought

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

REPLY = """Some *text* with `code` and a [link](https://example.org).

> quoted

```py
def f(x):  # comment
    return "string", 1
```

| a | b |
|---|---|
| 1 | 2 |
"""
CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")


def check(page: Page, least: int) -> None:
    faults, (seen, low) = page.evaluate(f"() => {{ {CHECKS} return [faults(), contrast()]; }}")
    assert faults == []
    assert low == []
    assert seen >= least


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_every_view_has_contrast_names_and_room(
    new_page: Callable[..., Page], canned: PageServer, scheme: str, width: int
) -> None:
    """320 px is also what is left of 640 px at a zoom of 200 %."""
    canned.cluster = cluster_answer(workers=4, lost=[2])
    canned.replies = [[Thought("Hm."), REPLY]]
    page = new_page(viewport={"width": width, "height": 700}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(canned.url)
    page.locator("#model", has_text="demo").wait_for()
    check(page, 3)
    page.get_by_label("Message", exact=True).fill("A question of some length, so that it has to be cut")
    page.keyboard.press("Enter")
    expect(page.locator(".facts")).not_to_be_empty()
    page.locator(".thinking summary").click()
    page.locator(".message.user").hover()
    check(page, 20)
    for shortcut in ("Alt+p", "Alt+k"):
        page.keyboard.press(shortcut)
        check(page, 10)
        page.keyboard.press("Escape")
    canned.health = (503, {"status": "loading", "stage": "weights", "progress": 0.5})
    page.goto(f"{canned.url}/#/cluster")
    page.reload()
    expect(page.locator(".workers tbody tr")).to_have_count(4)
    expect(page.locator("#banner")).to_be_visible()
    page.locator(".heat summary").click()
    check(page, 60)
    box = page.locator("#cluster-body").evaluate("(node) => [node.scrollWidth, node.clientWidth]")
    assert box[0] <= box[1]


def test_the_scheme_can_be_chosen_and_is_kept(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("radio", name="Dark").check()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.get_by_role("radio", name="System").check()
    assert page.evaluate(ground) == light


def test_all_of_a_conversation_by_keyboard(page: Page, canned: PageServer) -> None:
    focused = "document.activeElement.id || document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "message"
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    gate = Gate()
    canned.replies = [["Well", gate, "."], ["Other."]]
    page.keyboard.press("Enter")
    expect(page.locator(".prose").nth(1)).to_have_text("Well")
    assert page.evaluate(focused) == "message"
    gate.open()
    expect(page.locator(".facts")).not_to_be_empty()
    assert canned.requests[0]["messages"][0]["content"] == "One\ntwo"
    for name in ("Regenerate", "Copy the reply"):
        page.keyboard.press("Shift+Tab")
        assert page.evaluate(focused) == name
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant > .prose")).to_have_text("Other.")
    page.keyboard.press("Alt+k")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Alt+n")
    expect(page.locator(".message")).to_have_count(0)
    assert page.evaluate(focused) == "message"
    page.go_back()
    expect(page.locator(".message")).to_have_count(2)
    page.go_forward()
    expect(page.locator(".message")).to_have_count(0)
    assert page.evaluate("document.querySelector('a, button, input, [tabindex]').className") == "skip"
    page.locator(".skip").focus()
    expect(page.locator(".skip")).to_be_in_viewport()
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "message"
    page.get_by_role("link", name="One").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(2)


def test_replies_are_read_by_the_block_and_not_by_the_token(page: Page, canned: PageServer) -> None:
    page.evaluate(
        """() => {
          window.heard = [];
          new MutationObserver((changes) => {
            for (const { addedNodes } of changes) {
              heard.push(...[...addedNodes].map((node) => node.textContent));
            }
          }).observe(document.getElementById("said"), { childList: true });
        }"""
    )
    canned.replies = [[*"First block.\n\n", *"Second block.\n\n```py\n1\n```"]]
    page.keyboard.type("Say")
    page.keyboard.press("Enter")
    expect(page.locator(".facts")).not_to_be_empty()
    expect(page.locator("#said")).to_contain_text("The reply is complete.")
    assert page.evaluate("heard") == [
        "Answering.", "First block.", "Second block.", "Code block", "The reply is complete."
    ]  # fmt: skip
    live = page.evaluate("[...document.querySelectorAll('[aria-live]')].map((node) => node.id)")
    assert live == ["said"]


def test_a_phone_has_the_list_in_a_drawer(new_page: Callable[..., Page], canned: PageServer) -> None:
    page = new_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.goto(canned.url)
    page.locator("#model", has_text="demo").wait_for()
    field = page.get_by_label("Message", exact=True)
    field.tap()
    page.keyboard.type("One")
    page.keyboard.press("Enter")  # there is no Shift on glass: a line
    page.keyboard.type("two")
    expect(field).to_have_value("One\ntwo")
    page.get_by_role("button", name="Send", exact=True).tap()
    expect(page.locator(".message.assistant .prose").last).to_have_text("Hello.")
    opener = page.locator("#chat .open-sidebar")
    expect(page.get_by_role("navigation")).to_be_hidden()
    opener.tap()
    expect(page.get_by_role("navigation")).to_be_visible()
    expect(page.get_by_role("button", name="Close the list")).to_be_focused()
    assert page.evaluate("document.getElementById('main').inert")
    page.keyboard.press("Escape")
    expect(page.get_by_role("navigation")).to_be_hidden()
    expect(opener).to_be_focused()
    opener.tap()
    page.get_by_role("link", name="New chat").tap()
    expect(page.get_by_role("navigation")).to_be_hidden()
    expect(page.locator(".message")).to_have_count(0)
