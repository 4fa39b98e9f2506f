"""The page's Markdown, in a browser: against markdown-it, against itself in pieces, against hostile text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from markdown_it import MarkdownIt

from support.page_server import PageServer, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DRAW = """async (texts) => {
  const { drawMarkdown } = await import("/page/markdown.js");
  return texts.map((text) => {
    const parent = document.createElement("div");
    drawMarkdown(text, parent);
    return parent.outerHTML;
  });
}"""
STREAM = """async (cases) => {
  const { MarkdownView, drawMarkdown } = await import("/page/markdown.js");
  return cases.map(([text, cuts]) => {
    const [whole, streamed] = [document.createElement("div"), document.createElement("div")];
    drawMarkdown(text, whole);
    const finished = [];
    const view = new MarkdownView(streamed, (block) => finished.push(block));
    for (const cut of cuts) view.update(text.slice(0, cut));
    view.update(text, true);
    return [whole.outerHTML, streamed.outerHTML, finished.join("")];
  });
}"""


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    server = PageServer()
    with running(server.app()) as url:
        page = browser.new_page()
        page.goto(url)
        yield page
        page.close()


# Whether an element holds blocks, so that line breaks around it mean nothing.
BLOCKS = {
    "div",
    "p",
    "ul",
    "ol",
    "li",
    "blockquote",
    "pre",
    "hr",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
}
BLOCKS |= {f"h{level}" for level in range(1, 7)}
CLOSED = {"a", "code", "em", "strong", "s", "del", "p", "li", "blockquote"}
DROPPED = {"figure", "figcaption", "button", "span", "svg", "path", "div"}


class Outline(HTMLParser):
    """Elements and text as a list, without the page's own frames around code and tables, and p in li."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.shift = shift
        self.open: list[str] = []
        self.skipping = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "figcaption":
            self.skipping += 1
        if self.skipping or tag in DROPPED or (tag == "p" and "li" in self.open[-2:]):
            pass
        elif tag[0] == "h" and tag[1:].isdigit():
            self.found.append(f"h{min(6, int(tag[1:]) + self.shift)}")
        else:
            kept = [value for name, value in attrs if name in ("href", "start")]
            self.found.append((tag, *kept))
        if tag in ("br", "hr"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass
        if tag == "figcaption":
            self.skipping -= 1
        elif not self.skipping and tag in CLOSED and not (tag == "p" and self.open[-1:] == ["li"]):
            self.found.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self.skipping:
            return
        if "pre" not in self.open:
            data = data.strip("\n") if self.open and self.open[-1] not in BLOCKS - {"p"} else data.strip()
        if data:
            if self.found and isinstance(self.found[-1], str) and self.found[-1].startswith("="):
                self.found[-1] += data
            else:
                self.found.append(f"={data}")


def outline(html: str, shift: int) -> list[Any]:
    parser = Outline(shift)
    parser.feed(html)
    same = {("s",): ("del",), "/s": "/del"}
    stripped = [part.rstrip("\n") if isinstance(part, str) else part for part in parser.found]
    return [same.get(part, part) for part in stripped if part != "="]


DOCUMENTS = [
    "# Ducks\n\nThey *swim*, **dive** and ***fly***.\n\n## Food ##\ngrass  \nseeds\\\nsnails",
    "1. one\n2. two\n   - a\n   - b\n     1. deep\n3. three\n\n   more\n\ntext\n\n7. seven\n8. eight",
    "* a\n* b\n\n- other list\n- of it\n\n+ third",
    "```python\ndef f():\n    return '`' * 3\n\n# end\n```\n\nbehind\n\n~~~\n```\n~~~\n\n````md\n```\n````",
    "```js\nunclosed\n  <b>",
    "- item\n  ```sh\n  ls -l\n  ```\n  behind\n- next",
    "| a | b |\n|:--|--:|\n| 1 | `x\\|y` |\n| *2* |\n\nno | table\n\na | b\n--|--\n3 | 4",
    "> quote *with* emphasis\n> second\n>\n> - list\n>   in it\n\nafter",
    "a `code` and ``co`de`` and `` ` `` and `un closed and `a *b* c`",
    '[link](https://example.org/a_b_c) and [with *emphasis*](<https://example.org/x y> "title") <https://example.org/>',
    "[a](http://example.org/(x)) [b] (no) [c][d] ![image](https://example.org/i.png)",
    "snake_case_name, 2 * 3 * 4, a*b*c, __init__ and _one two_ and ~~gone~~ and ~one~",
    "**bold *and em* in it** and *em **and bold***",
    "&amp; &lt;tag&gt; &copy-not &#65; &#x42; \\*no\\* \\# \\\\ \\a",
    '<div onclick="x">html</div> <!-- comment -->\n\n<script>alert(1)</script>',
    "para\n- list right behind\n- two\n\npara\n1. one\n\npara\n2. no list",
    "text\n***\nmore\n\n---\n\n- - -",
    "    indented\n      code\n\ntext",
    "# \n\n#no heading\n\n####### seven\n\n## a # b #",
    "*a **b* c** and *x*y*z* and **\n\n* * *\n\nlast **open",
]


def test_it_reads_what_markdown_it_reads(tab: Page) -> None:
    """Independent of the page: CommonMark, tables and strike-through, line ends as breaks, HTML as text."""
    reference = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    for text, drawn in zip(DOCUMENTS, tab.evaluate(DRAW, DOCUMENTS), strict=True):
        expected = outline(reference.render(text), 2)
        if "![image]" in text:  # an image is a link: nothing is fetched
            at = expected.index(("img",))
            expected[at : at + 1] = [("a", "https://example.org/i.png"), "=image", "/a"]
        assert outline(drawn, 0) == expected, text


CASES = {
    "**重要。**请看": "<p><strong>重要。</strong>请看</p>",
    "- [x] done\n- [ ] not": '<ul><li class="task"><p><input type="checkbox" disabled="" checked="" '
    'aria-label="Done"> done</p></li><li class="task"><p><input type="checkbox" disabled="" '
    'aria-label="Done"> not</p></li></ul>',
    "\\(a_1 * b_2\\) and $$x*y*z$$": '<p><span class="math">\\(a_1 * b_2\\)</span> and '
    '<span class="math">$$x*y*z$$</span></p>',
    "1. a\n  - two spaces": "<ol><li><p>a</p><ul><li><p>two spaces</p></li></ul></li></ol>",
    "see https://example.org/a_(b). And (https://example.org)": "<p>see "
    '<a href="https://example.org/a_(b)" target="_blank" rel="noopener noreferrer" '
    'title="https://example.org/a_(b)">https://example.org/a_(b)</a>. And '
    '(<a href="https://example.org/" target="_blank" rel="noopener noreferrer" title="https://example.org/">'
    "https://example.org</a>)</p>",
}


def test_what_it_reads_otherwise_is_meant(tab: Page) -> None:
    drawn = tab.evaluate(DRAW, list(CASES))
    for (text, expected), got in zip(CASES.items(), drawn, strict=True):
        assert got == f"<div>{expected}</div>", text


def test_code_is_coloured_and_stays_the_same_text(tab: Page) -> None:
    code = "def f(x):  # a comment\n    return 'a string', 12 if x else None"
    [drawn] = tab.evaluate(DRAW, [f"```python\n{code}\n```"])
    kinds = ["keyword", "comment", "string", "number"]
    assert all(f'<span class="code-{kind}">' in drawn for kind in kinds)
    parser = Outline(0)
    parser.feed(drawn)
    assert [part for part in parser.found if str(part).startswith("=")] == [f"={code}"]


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1)) [b](java\nscript:alert(1)) [c](&#106;avascript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>) [b](vbscript:x)",
    "[c](file:///etc/passwd) [d](//example.org)",
    '<javascript:alert(1)> <https://example.org/"onmouseover="alert(1)>',
    "![x](https://example.org/track.png) ![y](data:image/svg+xml,<svg/onload=alert(1)>)",
    '[a](https://example.org/"onmouseover="alert(1) "t\\"onclick=\\"x")',
    '```"><img src=x onerror=alert(1)>\ncode\n```',
    "```html\n</code></pre><script>alert(1)</script>\n```",
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <svg onload=alert(1)> | [x](javascript:1) |",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe><style>*{display:none}</style><base href=//x>",
    "[a]: javascript:alert(1)\n\n[a] [b][a]",
    "&lt;img src=x onerror=alert(1)&gt; &#60;script&#62;",
    "# <a href=javascript:alert(1)>x</a>\n\n> <b>\n\n- <i onclick=x>",
    "https://example.org/<script> http://[::1 https://user:pass@example.org",
]
ATTRIBUTES = """async (texts) => {
  const { drawMarkdown } = await import("/page/markdown.js");
  const parent = document.createElement("div");
  document.body.append(parent);
  for (const text of texts) drawMarkdown(text, parent);
  const all = [...parent.querySelectorAll("*")];
  const seen = all.flatMap((node) => node.getAttributeNames().map((name) => `${node.localName} ${name}`));
  const links = [...parent.querySelectorAll("[href]")].map((link) => link.protocol + link.rel + link.target);
  const text = parent.textContent;
  parent.remove();
  return [[...new Set(all.map((node) => node.localName))], [...new Set(seen)], [...new Set(links)], text];
}"""
ALLOWED = set(
    [
        "p",
        "br",
        "h3",
        "h4",
        "h5",
        "h6",
        "ul",
        "ol",
        "li",
        "blockquote",
        "figure",
        "figcaption",
        "span",
        "button",
        "svg",
        "path",
        "pre",
        "code",
        "hr",
        "em",
        "strong",
        "del",
        "a",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "input",
    ]
)


def test_hostile_text_is_text(tab: Page) -> None:
    elements, attributes, links, text = tab.evaluate(ATTRIBUTES, HOSTILE)
    assert set(elements) <= ALLOWED
    assert not [
        name for name in attributes if name.split()[1].startswith("on") or "src" in name or "style" in name
    ]
    assert set(links) == {"https:noopener noreferrer_blank"}
    for spelled in ("<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "[a](javascript:alert(1))"):
        assert spelled in text


PIECES = [
    "\n",
    "\n\n",
    "  ",
    "- ",
    "1. ",
    "2) ",
    "> ",
    "# ",
    "```",
    "```py\n",
    "~~~\n",
    "| a | b |\n",
    "|--|--|\n",
    "word",
    "a_b",
    "*",
    "**",
    "`",
    "[x](",
    "https://example.org/",
    ")",
    "](",
    "---\n",
    "\t",
    "$$",
    "\\",
    "\\[",
    "\\]",
    "<b>",
    "&amp;",
    "~~",
    "- [ ] ",
    "é",
    "鸭",
    "🦆",
    "\r\n",
    "    ",
]


def random_case(rng: random.Random) -> tuple[str, list[int]]:
    text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 40)))
    if rng.random() < 0.3:
        text += rng.choice(DOCUMENTS)
    length = len(text.encode("utf-16-le")) // 2  # as JavaScript counts
    cuts = sorted(rng.randrange(length + 1) for _ in range(rng.randrange(12)))
    return text, list(range(length)) if rng.random() < 0.3 else cuts


def test_pieces_give_the_same_as_the_whole(tab: Page) -> None:
    rng = random.Random(5)
    cases = [random_case(rng) for _ in range(600)] + [(text, list(range(len(text)))) for text in DOCUMENTS]
    for (text, cuts), (whole, streamed, _) in zip(cases, tab.evaluate(STREAM, cases), strict=True):
        assert streamed == whole, json.dumps([text, cuts])


def test_every_block_is_told_once(tab: Page) -> None:
    text = "# Head\n\nOne.\n\n- two\n- three\n\n```\ncode\n```\n\nlast"
    [[_, _, told]] = tab.evaluate(STREAM, [[text, list(range(len(text)))]])
    assert told == "HeadOne.twothreeCode blocklast"


COUNT_NODES = """async ([text, piece]) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const parent = document.createElement("div");
  let made = 0;
  const create = document.createElement;
  document.createElement = function (name) { made += 1; return create.call(document, name); };
  const view = new MarkdownView(parent);
  for (let end = piece; end < text.length; end += piece) view.update(text.slice(0, end));
  view.update(text, true);
  delete document.createElement;
  return [made, parent.querySelectorAll("*").length];
}"""


@pytest.mark.parametrize(
    "text",
    [
        "A paragraph of *some* words.\n\n" * 1500,
        "- an item with `code`\n" * 1500,
        "```\n" + "a line of code\n" * 3000,
        "> quote\n\n# head\n\n| a |\n|---|\n| b |\n\n" * 400,
    ],
    ids=["paragraphs", "list", "code", "mixed"],
)
def test_long_replies_are_not_drawn_again_and_again(tab: Page, text: str) -> None:
    made, kept = tab.evaluate(COUNT_NODES, [text, 16])
    assert made < 8 * kept + 100


@pytest.mark.parametrize(
    "text",
    [
        "*a " * 40_000,
        "*" * 100_000,
        "**a*" * 30_000,
        "[" * 100_000,
        "[](" * 40_000,
        "](" * 40_000,
        "`" * 100_000,
        "".join("`" * n + "a" for n in range(400)),
        "> " * 50_000,
        "- " * 50_000,
        "#" * 100_000 + "x",
        "# " + " " * 100_000 + "x",
        "```" + " " * 100_000 + "`",
        "|" * 100_000 + "\n" + "|-" * 50_000,
        "\\(" * 50_000,
        "$$ a " * 30_000,
        "https://example.org/" + ")" * 100_000,
        "<https://" * 20_000,
        "&#" * 50_000,
        "1. a\n" * 20_000,
        "".join("  " * n + "- a\n" for n in range(300)),
        "a\n" * 40_000,
        "- a\n\n" * 10_000,
        "_a " * 40_000 + "b_ " * 40_000,
    ],
    ids=range(24),
)
def test_nothing_takes_for_ever(tab: Page, text: str) -> None:
    """Each ends before the browser's driver loses patience, and no character of prose is lost."""
    [drawn] = tab.evaluate(DRAW, [text])
    assert drawn.count("a") >= min(1, text.count("a"))
