"""A Hugging Face hub on loopback that serves one folder as one model, and a local cache made by hand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPO = "flock/tiny-duck"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """What the server serves, and what it was asked for.

    Args:
        folder: The model's files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = ""
        self.served: list[str] = []
        self.status, self.error_code = 200, ""
        self.broken: set[str] = set()

    def files(self) -> dict[str, bytes]:
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


@contextmanager
def running_hub(folder: Path) -> Iterator[FakeHub]:
    """Serves a folder as the model ``flock/tiny-duck``."""
    hub = FakeHub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_arguments: object) -> None:
            pass

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if hub.status != 200:
                self.answer(hub.status, b"{}", **({"X_Error_Code": hub.error_code} if hub.error_code else {}))
            elif path == f"/api/models/{REPO}" or path == f"/api/models/{REPO}/revision/main":
                self.answer(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode())
            elif path == f"/api/models/{REPO}/tree/{COMMIT}":
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in hub.files().items()
                ]
                self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
            elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
                self.file(path.removeprefix(f"/{REPO}/resolve/{COMMIT}/"))
            elif "/revision/" in path and REPO in path:
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            else:
                self.answer(404, b"{}", X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

        def file(self, name: str) -> None:
            data = hub.files()[name]
            if name in hub.broken:
                self.answer(404, b"", X_Error_Code="EntryNotFound")
                return
            if self.command == "GET":
                hub.served.append(name)
            self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=COMMIT)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_cache(cache: Path, source: Path) -> Path:
    """Puts a folder's files into a Hugging Face cache as huggingface_hub does; returns the snapshot."""
    storage = cache / ("models--" + REPO.replace("/", "--"))
    snapshot = storage / "snapshots" / COMMIT
    for folder in (snapshot, storage / "blobs", storage / "refs"):
        folder.mkdir(parents=True)
    (storage / "refs/main").write_text(COMMIT)
    for path in source.iterdir():
        blob = storage / "blobs" / hashlib.sha1(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot
