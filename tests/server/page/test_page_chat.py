"""The chat of the page in a browser, against a server of canned answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from support.page_server import Failure, Gate, PageServer, Thought

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def reply(page: Page, number: int = 1) -> Locator:
    """The text of a reply, the first being 1."""
    return page.locator(".message.assistant > .prose").nth(number - 1)


def whole(page: Page, number: int = 1) -> None:
    expect(page.locator(".message.assistant").nth(number - 1).locator(".facts")).not_to_be_empty()


def saved(page: Page, text: str) -> None:
    """Returns once the browser's store has ``text`` in a reply that is settled."""
    page.evaluate(
        """async (text) => {
          const opened = await new Promise((resolve) => {
            const request = indexedDB.open("duckllm");
            request.onsuccess = () => resolve(request.result);
          });
          const all = () => new Promise((resolve) => {
            const request = opened.transaction("bodies").objectStore("bodies").getAll();
            request.onsuccess = () => resolve(request.result);
          });
          for (;;) {
            const messages = (await all()).flatMap((body) => Object.values(body.messages));
            if (messages.some(({ content, state }) => content.includes(text) && state !== "streaming")) break;
            await new Promise((resolve) => setTimeout(resolve, 5));
          }
          opened.close();
        }""",
        text,
    )


def test_a_conversation_streams_goes_on_and_is_kept(page: Page, canned: PageServer) -> None:
    gate = Gate()
    canned.replies = [
        [Thought("Let me *see*."), "A **duck** is a ", gate, "bird.\n\n```py\nquack()\n```"],
        ["Yes."],
    ]
    send(page, "What is a duck?")
    expect(reply(page)).to_have_text("A duck is a")
    article = page.locator(".message.assistant")
    expect(article).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_hidden()
    gate.open()
    whole(page)
    expect(article).to_have_attribute("aria-busy", "false")
    expect(reply(page).locator("strong")).to_have_text("duck")
    expect(reply(page).locator("pre code")).to_have_text("quack()")
    facts = article.locator(".facts").inner_text()
    assert re.fullmatch(
        r"34 tokens · 56\.7 tok/s · first after [\d.]+ (µs|ms|s) · 8 of 12 prompt tokens cached · "
        r"70 % of guesses right",
        facts,
    )
    expect(page.locator(".thinking .prose")).to_be_hidden()
    page.locator(".thinking summary").click()
    expect(page.locator(".thinking .prose em")).to_have_text("see")

    send(page, "Does it swim?")
    whole(page, 2)
    first, second = canned.requests
    assert first == {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is a duck?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert second["messages"] == [
        {"role": "user", "content": "What is a duck?"},
        {
            "role": "assistant",
            "content": "A **duck** is a bird.\n\n```py\nquack()\n```",
            "reasoning_content": "Let me *see*.",
        },
        {"role": "user", "content": "Does it swim?"},
    ]

    saved(page, "Yes.")
    page.reload()
    expect(reply(page, 2)).to_have_text("Yes.")
    expect(reply(page).locator("pre code")).to_have_text("quack()")
    assert page.locator(".message.assistant .facts").first.inner_text() == facts
    expect(page.get_by_role("heading", level=1)).to_have_text("What is a duck?")
    expect(page.get_by_role("navigation").get_by_role("link", name="What is a duck?")).to_have_attribute(
        "aria-current", "page"
    )
    page.get_by_role("link", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("link", name="What is a duck?").click()
    expect(page.locator(".message")).to_have_count(4)


def test_escape_stops_a_reply_and_keeps_what_was_said(page: Page, canned: PageServer) -> None:
    gate = Gate()
    canned.replies = [["One, two, ", gate, "three."], ["Four."]]
    send(page, "Count")
    expect(reply(page)).to_have_text("One, two,")
    page.keyboard.press("Escape")
    expect(page.locator(".problem")).to_have_text("Stopped.")
    while not canned.num_left:  # the server learns of it, and its gate stays closed
        page.wait_for_timeout(5)
    send(page, "Go on")
    expect(reply(page, 2)).to_have_text("Four.")
    assert canned.requests[1]["messages"][1] == {"role": "assistant", "content": "One, two, "}
    saved(page, "Four.")
    page.reload()
    expect(reply(page)).to_have_text("One, two,")
    expect(page.locator(".problem")).to_have_text(["Stopped.", ""])


def test_a_reload_in_the_middle_of_a_reply_keeps_every_word(page: Page, canned: PageServer) -> None:
    gate = Gate()
    canned.replies = [["Quack ", "quack ", "quack.", gate], ["Again."]]
    send(page, "Say it")
    expect(reply(page)).to_have_text("Quack quack quack.")
    page.reload()
    expect(reply(page)).to_have_text("Quack quack quack.")
    expect(page.locator(".problem")).to_have_text("Broken off.")
    gate.open()
    page.get_by_role("button", name="Regenerate").click()
    expect(reply(page)).to_have_text("Again.")


def test_another_conversation_can_be_read_while_one_is_answered(page: Page, canned: PageServer) -> None:
    gate = Gate()
    canned.replies = [["Slow ", gate, "reply."], ["Quick."]]
    send(page, "First")
    expect(reply(page)).to_have_text("Slow")
    page.keyboard.press("Alt+n")
    send(page, "Second")
    whole(page)
    expect(reply(page)).to_have_text("Quick.")
    expect(page.get_by_role("link", name="First is being answered")).to_be_visible()
    gate.open()
    page.get_by_role("link", name="First").click()
    expect(reply(page)).to_have_text("Slow reply.")


def test_other_replies_and_edits_are_branches(page: Page, canned: PageServer) -> None:
    canned.replies = [["Red."], ["Green."], ["Loud."]]
    send(page, "A colour")
    whole(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(reply(page)).to_have_text("Green.")
    expect(page.locator(".place")).to_have_text("2/2")
    page.get_by_role("button", name="Version before").click()
    expect(reply(page)).to_have_text("Red.")
    expect(page.locator(".place")).to_have_text("1/2")
    assert canned.requests[0]["messages"] == canned.requests[1]["messages"]

    page.locator(".message.user").hover()
    page.get_by_role("button", name="Edit and send again").click()
    editor = page.locator(".editor textarea")
    expect(editor).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".said")).to_have_text("A colour")
    page.get_by_role("button", name="Edit and send again").click()
    editor.fill("A sound")
    page.keyboard.press("Enter")
    expect(reply(page)).to_have_text("Loud.")
    assert canned.requests[2]["messages"] == [{"role": "user", "content": "A sound"}]
    saved(page, "Loud.")
    page.reload()
    expect(page.locator(".said")).to_have_text("A sound")
    page.get_by_role("button", name="Version before").click()
    expect(reply(page)).to_have_text("Green.")  # the newest below it


HOSTILE = (
    '<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script> '
    "[link](javascript:window.hacked=1)\n![x](https://example.org/track.png)\n\n"
    "<iframe src=javascript:window.hacked=1></iframe><style>body{display:none}</style>"
)


def test_what_a_model_writes_is_text_wherever_it_is_shown(page: Page, canned: PageServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    canned.replies = [[Thought(HOSTILE), HOSTILE, Failure(HOSTILE)]]
    send(page, HOSTILE)
    expect(page.locator(".problem")).to_have_text(HOSTILE)
    page.locator(".thinking summary").click()
    expect(page.locator(".thinking .prose")).to_contain_text("<script>window.hacked=1</script>")
    expect(reply(page)).to_contain_text('<img src=x onerror="window.hacked=1">')
    expect(reply(page)).to_contain_text("[link](javascript:window.hacked=1)")
    expect(page.get_by_role("heading", level=1)).to_contain_text("<img src=x")
    links = page.locator("#messages a")
    expect(links).to_have_count(2)  # the image's address, in thought and reply
    for link in links.all():
        assert link.get_attribute("href") == "https://example.org/track.png"
        assert link.get_attribute("rel") == "noopener noreferrer"
    assert page.locator("#messages :is(img, script, iframe, style)").count() == 0
    assert page.evaluate("window.hacked") is None
    assert all(url.startswith(canned.url) for url in asked)


def test_settings_are_sent_where_they_are_set_and_belong_to_the_conversation(
    page: Page, canned: PageServer
) -> None:
    page.keyboard.press("Alt+p")
    for label, value in {
        "System prompt": "Be brief.",
        "Temperature": "0.5",
        "Top p": "0.9",
        "Top k": "40",
        "Min p": "7",  # no share: marked, and not sent
        "Longest reply": "64",
        "Seed": "3",
        "Stop strings": "END\n##",
    }.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Thinking", exact=True).select_option("Off")
    expect(page.get_by_label("Min p", exact=True)).to_have_attribute("aria-invalid", "true")
    page.keyboard.press("Escape")
    send(page, "Hello")
    whole(page)
    request = canned.requests[0]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {
        name: request[name] for name in set(request) - {"model", "messages", "stream", "stream_options"}
    } == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 64,
        "seed": 3,
        "stop": ["END", "##"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    saved(page, "Hello.")
    page.reload()
    page.keyboard.press("Alt+p")
    expect(page.get_by_label("Stop strings")).to_have_value("END\n##")
    page.get_by_role("button", name="Empty all fields").click()
    page.keyboard.press("Escape")
    send(page, "Again")
    whole(page, 2)
    assert set(canned.requests[1]) == {"model", "messages", "stream", "stream_options"}
    assert canned.requests[1]["messages"][0]["role"] == "user"


def test_an_empty_field_shows_what_the_model_does(page: Page, canned: PageServer) -> None:
    page.keyboard.press("Alt+p")
    page.get_by_label("Thinking", exact=True).select_option("On")
    expect(page.get_by_label("Temperature", exact=True)).to_have_attribute("placeholder", "model's own")
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
    canned.card = {"context_length": 64, "default_sampling_params": sampling, "can_switch_thinking": False}
    page.reload()
    expect(page.locator("#model")).to_have_text("demo, 64 tokens of context")
    page.keyboard.press("Alt+p")
    shown = {name: page.locator(f"#setting-{name}").get_attribute("placeholder") for name in sampling}
    assert shown == {"temperature": "0.6", "top_p": "0.95", "top_k": "0", "min_p": "0"}
    expect(page.get_by_label("Thinking", exact=True)).to_be_hidden()
    page.keyboard.press("Escape")
    send(page, "Hello")
    whole(page)
    assert "chat_template_kwargs" not in canned.requests[0]


def test_a_key_is_asked_for_kept_and_forgotten(new_page: Callable[..., Page], canned: PageServer) -> None:
    canned.key = "right"
    page = new_page()
    page.goto(canned.url)
    field = page.get_by_label("Key", exact=True)
    expect(page.get_by_role("dialog")).to_contain_text("The server wants a key.")
    field.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("does not take the key")
    field.fill("right")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_contain_text("demo")
    send(page, "Hello")
    expect(reply(page)).to_have_text("Hello.")
    page.reload()
    expect(page.locator("#model")).to_contain_text("demo")
    page.get_by_role("button", name="Data and key").click()
    expect(page.locator("#key-state")).to_have_text("A key is kept in this browser.")
    page.get_by_role("button", name="Forget the key").click()
    expect(page.locator("#key-state")).to_contain_text("No key is kept.")
    assert page.evaluate("JSON.stringify({...localStorage})").count("right") == 0
    page.keyboard.press("Escape")
    send(page, "Hello again")
    expect(page.get_by_role("dialog")).to_contain_text("The server wants a key.")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".problem.error")).to_have_text("A key is needed.")


def test_it_waits_while_the_model_loads_and_goes_on_by_itself(
    new_page: Callable[..., Page], canned: PageServer
) -> None:
    canned.health = (503, {"status": "loading", "stage": "weights", "progress": 0.25})
    page = new_page()
    page.goto(canned.url)
    banner = page.get_by_role("status").filter(has_text="loading")
    expect(banner).to_contain_text("The model is loading: weights, 25 %.")
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "0.25")
    send(page, "Are you there?")
    expect(page.locator(".waiting")).to_be_visible()
    assert canned.requests == []
    canned.health = (200, {"status": "ok"})
    expect(reply(page)).to_have_text("Hello.")
    expect(page.locator("#banner")).to_be_hidden()


def test_a_worker_that_is_lost_is_an_error_and_a_model_that_loads_is_waited_for(
    page: Page, canned: PageServer
) -> None:
    canned.refusal = (503, {"message": "Worker 1 is lost.", "type": "worker_lost_error", "code": None})
    send(page, "Hello")
    expect(page.locator(".problem.error")).to_have_text("Worker 1 is lost.")
    canned.health = (503, {"status": "loading", "stage": "weights", "progress": None})
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#banner-text")).to_contain_text("The model is loading: weights.")
    canned.refusal = None
    canned.health = (200, {"status": "ok"})
    expect(reply(page)).to_have_text("Hello.")


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (
            400,
            {"type": "exceed_context_size_error", "message": "m", "n_prompt_tokens": 5000, "n_ctx": 2048},
            "This conversation is too long for the model: it has 5,000 tokens of 2,048. "
            "Begin a new one, or edit an earlier message.",
        ),
        (
            400,
            {"message": "top_k: got -3, expected at least 0", "type": "invalid_request_error"},
            "top_k: got -3, expected at least 0",
        ),
        (500, {}, "The server answered with an error (500)."),
    ],
)  # fmt: skip
def test_refusals_are_told_in_words(
    page: Page, canned: PageServer, status: int, error: dict[str, object], words: str
) -> None:
    canned.refusal = (status, error)
    send(page, "Hello")
    expect(page.locator(".problem.error")).to_have_text(words)
    canned.refusal = None
    send(page, "Once more")
    expect(reply(page, 2)).to_have_text("Hello.")
    assert [message["role"] for message in canned.requests[0]["messages"]] == ["user", "user"]


def test_streams_that_fail_keep_what_came(page: Page, canned: PageServer) -> None:
    canned.replies = [["Half", Failure("A worker is lost.")], ["Half", Failure("")], ["Whole."]]
    send(page, "One")
    expect(page.locator(".problem.error")).to_have_text("A worker is lost.")
    expect(reply(page)).to_have_text("Half")
    send(page, "Two")
    expect(page.locator(".problem.error").nth(1)).to_have_text(
        "The connection broke off before the reply was whole."
    )
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.route("**/health", lambda route: route.abort())
    send(page, "Three")
    expect(page.locator(".problem.error").nth(2)).to_contain_text("The server does not answer.")
    expect(page.locator("#banner")).to_contain_text("The server does not answer. It is asked again")
    page.unroute_all()
    expect(page.locator("#banner")).to_be_hidden()
    send(page, "Four")
    expect(reply(page, 4)).to_have_text("Whole.")


def test_a_full_store_is_told_and_the_conversation_goes_on(page: Page, canned: PageServer) -> None:
    page.evaluate(
        """() => {
          IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
        }"""
    )
    send(page, "Hello")
    whole(page)
    expect(page.get_by_role("alert")).to_contain_text(
        "The browser does not keep this conversation: it has no more room for this page."
    )
    send(page, "And on")
    whole(page, 2)
    expect(page.get_by_role("alert")).to_have_count(1)


def test_renaming_exporting_deleting_and_importing(
    page: Page, canned: PageServer, new_page: Callable[..., Page]
) -> None:
    send(page, "Hello")
    whole(page)
    saved(page, "Hello.")
    page.get_by_role("button", name="This conversation").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name", exact=True).fill("Greeting")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Greeting")
    page.get_by_role("button", name="This conversation").click()
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Export as JSON").click()
    assert downloading.value.suggested_filename == "Greeting.json"
    exported = json.loads(downloading.value.path().read_text())
    assert exported["format"] == "duckllm-conversations"
    [conversation] = exported["conversations"]
    assert [message["content"] for message in conversation["messages"].values()] == ["Hello", "Hello."]

    page.get_by_role("button", name="This conversation").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("navigation")).to_contain_text("No conversations yet.")
    page.reload()
    expect(page.get_by_role("navigation")).to_contain_text("No conversations yet.")

    looping = {**conversation, "messages": {"a": {"id": "a", "parent": "a", "role": "user", "content": "x"}}}
    message = {
        "role": "user",
        "content": 5,
        "id": "m",
        "parent": None,
        "facts": {"__proto__": {"polluted": 1}},
    }
    rude = {"__proto__": {"polluted": True}, "messages": {"m": message}, "leaf": "m", "title": "<b>rude</b>"}
    exported["conversations"] += [looping, {}, None, rude]
    page.get_by_role("button", name="Data and key").click()

    def import_file(content: str) -> None:
        page.locator("#import").set_input_files(
            {"name": "a.json", "mimeType": "application/json", "buffer": content.encode()}
        )

    import_file(json.dumps(exported))
    expect(page.get_by_role("status").filter(has_text="imported")).to_contain_text(
        "2 imported, 3 left out, as they are damaged."
    )
    import_file("{")
    expect(page.get_by_role("alert")).to_contain_text("The file was not imported: it is no JSON.")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Greeting").click()
    expect(reply(page)).to_have_text("Hello.")
    expect(page.get_by_role("link", name="<b>rude</b>")).to_be_visible()
    assert page.evaluate("({}).polluted") is None


def test_two_pages_of_one_browser_show_the_same(
    page: Page, canned: PageServer, new_page: Callable[..., Page]
) -> None:
    other = new_page(page.context)
    other.goto(canned.url)
    send(page, "Hello")
    whole(page)
    other.get_by_role("link", name="Hello").click()
    expect(reply(other)).to_have_text("Hello.")
    send(page, "More")
    whole(page, 2)
    expect(other.locator(".message")).to_have_count(4)


def test_a_draft_outlives_a_reload(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("Half a thou")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Half a thou")


def test_copying(page: Page, canned: PageServer) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    canned.replies = [["```py\nprint(1)\n```"]]
    send(page, "Code")
    whole(page)
    page.get_by_role("button", name="Copy the code").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)"
    page.get_by_role("button", name="Copy the reply").click()
    expect(page.locator("#said")).to_contain_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "```py\nprint(1)\n```"
