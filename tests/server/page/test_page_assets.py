"""What the server hands out of the page: types, entity tags, the policy, and nothing from elsewhere."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from duckllm.server import page

MAX_BYTES = 150 * 1024
HTML_MAKERS = re.compile(
    r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser|srcdoc)"
)


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page.router())
    return TestClient(app)


def sources(suffix: str) -> dict[str, str]:
    return {name: asset.body.decode() for name, asset in page.assets().items() if name.endswith(suffix)}


def test_the_page_and_each_of_its_files_come_with_type_tag_and_policy(client: TestClient) -> None:
    index = client.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert index.text.startswith("<!doctype html>")
    types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
    names = [name for name in page.assets() if name != "index.html"]
    assert {name.rpartition(".")[2] for name in names} == set(types)
    for path, kind in [("/", None), *((f"/page/{name}", types[name.rpartition(".")[2]]) for name in names)]:
        answer = client.get(path)
        assert answer.status_code == 200
        if kind:
            assert answer.headers["content-type"] == kind
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self'",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        tag = answer.headers["etag"]
        again = client.get(path, headers={"If-None-Match": f'"other", W/{tag}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert client.get(path, headers={"If-None-Match": '"other"'}).content == answer.content
        head = client.head(path)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)
        assert head.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize("name", ["none.js", "index.html", "..%2Fpage.py", "%2e%2e/page.py", "sub/main.js"])
def test_other_names_are_not_found(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    index = page.assets()["index.html"].body.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", index)
    assert re.findall(r"<script[^>]*>(.*?)</script>", index, re.DOTALL) == ["", ""]
    named = re.findall(r'(?:src|href)="([^"#][^"]*)"', index)
    assert {name.removeprefix("/page/") for name in named} <= set(page.assets())
    for suffix in (".html", ".css", ".js", ".svg"):
        for name, text in sources(suffix).items():
            outside = [found for found in re.findall(r"https?://[\w.]+", text) if "www.w3.org" not in found]
            assert outside == [], name
    for name, text in sources(".js").items():
        assert not HTML_MAKERS.search(text), name
        imports = re.findall(r'from "\./([\w.]+)"', text)
        assert set(imports) <= set(page.assets()), name
    for name, text in sources(".css").items():
        assert "url(" not in text, name
        assert "@import" not in text, name


def test_the_page_is_small() -> None:
    assert sum(len(asset.body) for asset in page.assets().values()) < MAX_BYTES
