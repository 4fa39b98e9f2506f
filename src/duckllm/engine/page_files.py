"""Pages of the KV cache as files in a folder: what a process has computed is there for the next one.

Called by :mod:`duckllm.engine.disk_tier`, in its thread. docs/kv-cache.md specifies the bytes. A file appears
whole, under a hash of its tokens and of all before them, and is checked before it is used; a broken one is
removed and was never there. Knows bytes, no tensors and no requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duckllm.config import show_size
from duckllm.errors import CacheFormatError, ConfigError
from duckllm.weights.files import write_atomically

FORMAT_VERSION = 1
DESCRIPTION_FILE = "kv-cache.json"
HASH_BYTES = 16
_MAGIC = b"DUCKPAGE"
_CHECKSUM_BYTES = 32
# Magic and checksum, which no version changes; version, length of the description, length of the payload.
_FIXED = struct.Struct(f"<8s{_CHECKSUM_BYTES}sIIQ")
_NAME = re.compile(r"([0-9a-f]{32})\.page")
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.(\d+)-[0-9a-f]+\.partial")
# Where pages of a type are computed.
_DEVICES = {"float32": "CPU", "bfloat16": "GPU"}
# A file that cannot be ours is not read beyond this many times the length of ours.
_MOST_LENGTHS = 4

_log = logging.getLogger("duckllm")

PageBytes = npt.NDArray[np.uint8]


class PageKey(NamedTuple):
    """What a page is known by.

    Args:
        hash: Of the page's tokens and all before them.
        parent: The hash of the page before; of the first page, the seed of its format.
        tokens: The page's token ids, 8 bytes each.
    """

    hash: bytes
    parent: bytes
    tokens: bytes

    @classmethod
    def of(cls, parent: bytes, tokens: bytes) -> PageKey:
        """The key of the page with these tokens behind ``parent``."""
        return cls(hashlib.blake2b(parent + tokens, digest_size=HASH_BYTES).digest(), parent, tokens)


@dataclass(frozen=True)
class PageFormat:
    """What pages must have in common to be one another's.

    Args:
        model_hash: Of the model that computed them.
        dtype: Type of their numbers.
        layer_widths: Numbers that each tensor of each layer keeps of a token.
        page_tokens: Tokens of a page.
        page_bytes: Bytes of a page's content.
        arithmetic: What else decides their bits; pages that differ in it may share a folder.
    """

    model_hash: str
    dtype: str
    layer_widths: tuple[tuple[int, ...], ...]
    page_tokens: int
    page_bytes: int
    arithmetic: str = ""

    @property
    def description(self) -> dict[str, Any]:
        """What a folder and each of its files say of themselves."""
        return {
            "model_hash": self.model_hash,
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype,
            "page_tokens": self.page_tokens,
            "layer_widths": [list(widths) for widths in self.layer_widths],
        }

    @cached_property
    def description_bytes(self) -> bytes:
        """The description as a file holds it."""
        return json.dumps(self.description, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def seed(self) -> bytes:
        """Stands for what is before a first page, so that pages of another format are never found."""
        said = self.description_bytes + b"\n" + self.arithmetic.encode()
        return hashlib.blake2b(said, digest_size=HASH_BYTES).digest()

    @property
    def payload_start(self) -> int:
        """Where a file's content begins."""
        return _FIXED.size + len(self.description_bytes) + HASH_BYTES + 8 * self.page_tokens

    @property
    def file_bytes(self) -> int:
        """Length of every file."""
        return self.payload_start + self.page_bytes


def to_file(page_format: PageFormat, key: PageKey, content: PageBytes) -> bytearray:
    """A page as its file's bytes."""
    description = page_format.description_bytes
    data = bytearray(_FIXED.pack(_MAGIC, b"", FORMAT_VERSION, len(description), len(content)))
    data += description + key.parent + key.tokens
    data += content.data
    data[8 : 8 + _CHECKSUM_BYTES] = _checksum(data)
    return data


def _checksum(data: bytes | bytearray | memoryview) -> bytes:
    digest = hashlib.blake2b(data[: len(_MAGIC)], digest_size=_CHECKSUM_BYTES)
    digest.update(memoryview(data)[len(_MAGIC) + _CHECKSUM_BYTES :])
    return digest.digest()


def describe_difference(page_format: PageFormat, got: Any) -> str:
    """The first field in which a description differs from this format's, what it is and what was expected."""
    if not isinstance(got, dict):
        return "description: got none, expected an object"
    for field, expected in page_format.description.items():
        if got.get(field) != expected:
            if field == "layer_widths" and (drafts := _other_drafts(got.get(field), len(expected))):
                return drafts
            if field == "dtype" and (device := _other_device(got.get(field), expected)):
                return device
            return f"{field}: got {_shown(got.get(field))}, expected {_shown(expected)}"
    return ""


def _other_drafts(got: object, num_layers: int) -> str:
    """What a layer more or less than expected comes from; empty where it is something else."""
    if not isinstance(got, list) or abs(len(got) - num_layers) != 1:
        return ""
    made, now = ("on or auto", "off") if len(got) > num_layers else ("off", "on or auto")
    return f"these pages were made with draft {made}, and it is {now} now"


def _other_device(got: object, expected: str) -> str:
    """What pages of another type come from; empty where it is no type of ours, or the one expected."""
    made, now = (_DEVICES.get(each) if isinstance(each, str) else None for each in (got, expected))
    if made is None or now is None or made == now:
        return ""
    return f"these pages were computed on a {made} in {got}, and it is a {now} now"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}... (all of it hashes to {_short_hash(text)})"


def _short_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def check_folder(folder: Path, model_hash: str, num_layers: int, dtype: str) -> None:
    """Refuses, before anything is loaded, a folder that cannot be used; what is left is checked in use.

    Args:
        folder: It may be missing yet.
        model_hash: The model's.
        num_layers: Layers that keep something of a token, one that guesses among them.
        dtype: Type of the numbers.

    Raises:
        CacheFormatError: It is another model's, or made with guesses and used without them, or on a CPU and
            used with a GPU, or the other way round, or holds something else.
        ConfigError: It is no folder.
    """
    path = folder / DESCRIPTION_FILE
    try:
        if not folder.exists():
            return
        got = _read_description(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    if not isinstance(got, dict):
        return
    if got.get("model_hash") != model_hash:
        difference = f"model_hash: got {_shown(got.get('model_hash'))}, expected {_shown(model_hash)}"
        raise CacheFormatError(_of_another(path, difference))
    difference = _other_device(got.get("dtype"), dtype) or _other_drafts(got.get("layer_widths"), num_layers)
    if difference:
        raise CacheFormatError(_of_another(path, difference))


def _read_description(folder: Path) -> Any:
    """What ``kv-cache.json`` says; None in a folder that has none and is empty.

    Raises:
        CacheFormatError: It is broken, or is missing beside something else.
        OSError: The folder cannot be read.
    """
    path = folder / DESCRIPTION_FILE
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        others = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        if others and DESCRIPTION_FILE not in others:
            raise CacheFormatError(
                f"{folder}: got a folder with {others[0]!r} and no {DESCRIPTION_FILE}, "
                "expected pages of the KV cache, or nothing"
            ) from None
        return None
    except (ValueError, RecursionError) as error:
        raise CacheFormatError(f"{path}: cannot be read ({error})") from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    reason = error.strerror or "no reason given"
    return ConfigError("kv_disk_dir", str(folder), "a folder that can be used", reason)


def _of_another(path: Path, difference: str) -> str:
    return f"{path}: {difference}; another model or layout needs another folder"


class PageFolder:
    """The files of a folder, the one used longest ago first, no more of them than a budget allows.

    Several processes may use one folder: a file appears by being renamed, and who finds one gone has one page
    less. Each counts only what it found at its start and wrote itself against its budget.

    Args:
        path: The folder; made where there is none.
        page_format: Of the pages.
        budget_bytes: Most bytes that the files may have together.

    Raises:
        CacheFormatError: The folder holds pages of another model or format, or something else.
        ConfigError: The folder cannot be used, or the budget holds no page.
    """

    def __init__(self, path: Path, page_format: PageFormat, budget_bytes: int) -> None:
        self.path, self.format = path, page_format
        self.max_pages = budget_bytes // page_format.file_bytes
        if not self.max_pages:
            least = show_size(page_format.file_bytes, up=True)
            raise ConfigError("kv_disk_bytes", show_size(budget_bytes), f"at least {least}, one page")
        self._own = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._index: OrderedDict[bytes, None] = OrderedDict()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_description()
            self._scan()
        except OSError as error:
            raise _unusable(path, error) from error

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._index

    def __len__(self) -> int:
        return len(self._index)

    def missing(self, chain: Iterable[tuple[PageKey, int]]) -> list[tuple[PageKey, int]]:
        """Those of some pages that are not there."""
        return [each for each in chain if each[0].hash not in self._index]

    def path_of(self, page_hash: bytes) -> Path:
        """The file of a page, there or not."""
        name = page_hash.hex()
        return self.path / name[:2] / f"{name}.page"

    def read(self, key: PageKey) -> PageBytes | None:
        """A page's content; None, and nothing is left of it, where it is not there or broken."""
        path = self.path_of(key.hash)
        try:
            content = self._content(path, key.hash)
        except OSError:
            content = None
        if content is None:
            self._index.pop(key.hash, None)
        return content

    def write(self, key: PageKey, content: PageBytes) -> None:
        """Keeps a page; those used longest ago make room.

        Raises:
            OSError: It could not be written; nothing is left of it.
        """
        if key.hash in self._index:
            return
        self._make_room(self.max_pages - 1)
        path = self.path_of(key.hash)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_name(f".{key.hash.hex()}.{self._own}.partial")
        try:
            # Not synced: after a loss of power a torn file fails its check and counts as missing.
            with open(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0
            ) as file:
                rest = memoryview(to_file(self.format, key, content))
                while rest:
                    rest = rest[file.write(rest) :]
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._index[key.hash] = None

    def use(self, hashes: Iterable[bytes], *, lasting: bool = True) -> None:
        """Makes pages the youngest, the last one of ``hashes`` the very youngest.

        Args:
            hashes: Pages, there or not.
            lasting: Whether the next process shall know it too.
        """
        now = time.time_ns()
        for number, page_hash in enumerate(hashes):
            if page_hash not in self._index:
                continue
            self._index.move_to_end(page_hash)
            if lasting:
                try:
                    os.utime(self.path_of(page_hash), ns=(now + number, now + number))
                except OSError:  # gone, or not ours to touch: only an order is lost
                    continue

    def _check_description(self) -> None:
        path = self.path / DESCRIPTION_FILE
        if not path.exists():
            _read_description(self.path)  # refuses what else may be there
            self._describe(path)
        # Where there was none, another process may have been first, with another format.
        got = _read_description(self.path)
        if difference := describe_difference(self.format, got):
            raise CacheFormatError(_of_another(path, difference))

    def _describe(self, path: Path) -> None:
        """Writes what the folder is, unless it is said by now: of several processes the first one does."""
        partial = path.with_name(f".{path.name}.{self._own}.partial")
        try:
            write_atomically(partial, json.dumps(self.format.description, indent=1).encode() + b"\n")
            try:
                os.link(partial, path)
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _scan(self) -> None:
        """Finds the files that are there; removes what interrupted writes left."""
        found: list[tuple[int, bytes]] = []
        for folder in os.scandir(self.path):
            if len(folder.name) == 2 and folder.is_dir():
                for entry in os.scandir(folder.path):
                    # Another process may remove it meanwhile, or it may be no file of ours.
                    with suppress(OSError):
                        found += self._found(entry)
        self._index.update((page_hash, None) for _, page_hash in sorted(found))
        self._make_room(self.max_pages)

    def _found(self, entry: os.DirEntry[str]) -> list[tuple[int, bytes]]:
        """The time and hash of a page, if an entry of a folder is one."""
        if match := _NAME.fullmatch(entry.name):
            page_hash, status = bytes.fromhex(match[1]), entry.stat()
            whole = S_ISREG(status.st_mode) and status.st_size == self.format.file_bytes
            if whole or self._content(Path(entry.path), page_hash) is not None:
                return [(status.st_mtime_ns, page_hash)]
        elif (match := _PARTIAL.fullmatch(entry.name)) and not _is_running(int(match[1])):
            Path(entry.path).unlink(missing_ok=True)
        return []

    def _make_room(self, most: int) -> None:
        while len(self._index) > most:
            oldest = next(iter(self._index))
            self.path_of(oldest).unlink(missing_ok=True)
            del self._index[oldest]

    def _content(self, path: Path, page_hash: bytes) -> PageBytes | None:
        """What a file holds, once it is known to be that; a broken one is removed, a foreign one is named."""
        status = path.stat()
        if not S_ISREG(status.st_mode):  # a pipe would be waited for
            _log.warning("%s: got no regular file; not used", path)
            return None
        size = status.st_size
        if size > _MOST_LENGTHS * self.format.file_bytes:
            _log.warning("%s: got %d bytes, expected %d; not used", path, size, self.format.file_bytes)
            return None
        content = np.fromfile(path, np.uint8)
        data = content.data
        checksum = bytes(data[len(_MAGIC) : len(_MAGIC) + _CHECKSUM_BYTES])
        if len(data) < _FIXED.size or bytes(data[: len(_MAGIC)]) != _MAGIC or _checksum(data) != checksum:
            path.unlink(missing_ok=True)
            return None
        if difference := self._difference(data, page_hash):
            _log.warning("%s: %s; not used", path, difference)
            return None
        return content[self.format.payload_start :]

    def _difference(self, data: memoryview, page_hash: bytes) -> str:
        """How a whole file is not the one that was looked for; empty where it is."""
        _, _, version, description_bytes, payload_bytes = _FIXED.unpack_from(data)
        if version != FORMAT_VERSION:
            return f"format_version: got {version}, expected {FORMAT_VERSION}"
        start = _FIXED.size + description_bytes
        description = bytes(data[_FIXED.size : start])
        if description != self.format.description_bytes:
            try:
                return describe_difference(self.format, json.loads(description)) or "description: got another"
            except (ValueError, RecursionError):
                return "description: got no JSON, expected an object"
        if payload_bytes != self.format.page_bytes or len(data) != self.format.file_bytes:
            return f"length: got {payload_bytes} in {len(data)}, expected {self.format.page_bytes}"
        tokens = start + HASH_BYTES
        key = PageKey.of(bytes(data[start:tokens]), bytes(data[tokens : self.format.payload_start]))
        return "" if key.hash == page_hash else f"hash: got {key.hash.hex()}, expected {page_hash.hex()}"


def _is_running(pid: int) -> bool:
    """Whether a process of this number runs here, so that what it writes is not to be removed."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
