"""Models by their name on the Hugging Face hub: found in its local cache, or downloaded into it.

Called by :mod:`duckllm.weights.resolve`. Names, cache and downloads are huggingface_hub's, which is imported
when it is needed: a worker has none. Of a repository only data is fetched; no code of it is ever executed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duckllm.errors import (
    CheckpointError,
    ConfigError,
    DiskSpaceError,
    MissingPackageError,
    ModelNotFoundError,
    without_credentials,
)
from duckllm.weights.checkpoint import INDEX, list_names, load_json
from duckllm.weights.convert import COPIED_FILES

# org/name, or org/name@revision; a revision is a branch, a tag or a commit.
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
_WANTED = ("*.safetensors", INDEX, *COPIED_FILES)
# Subfolders and what mistral-common reads hold the same weights once more.
_UNWANTED = ("*/*", "consolidated*.safetensors")
_TOKENIZERS = ("tokenizer*", "vocab*", "*.tiktoken", "tiktoken.model", "tekken.json")


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Args:
        repo_id: ``org/name``.
        revision: A branch, tag or commit; None for the main branch.
    """

    repo_id: str
    revision: str | None

    @classmethod
    def parse(cls, name: str) -> HubModel | None:
        """What ``org/name`` or ``org/name@revision`` stands for; None if ``name`` is neither."""
        match = _NAME.fullmatch(name)
        return cls(match["repo"], match["revision"]) if match else None

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"

    def find(self, check: Callable[[Path], object]) -> Path:
        """The folder of its files in the local cache, whole; downloaded where it is not there, or in part.

        Args:
            check: Called with a folder that has config.json before the weights are downloaded: raises what is
                wrong with it.

        Raises:
            ModelNotFoundError: It is not in the cache and cannot be downloaded, for the reason given.
            CheckpointError: It is in the cache in part, and the rest cannot be downloaded.
            DiskSpaceError: No room for the download.
            MissingPackageError: huggingface_hub is not installed.
        """
        snapshot_download = _snapshot_download()
        cached, absent = self._in_cache(snapshot_download)
        if cached is not None and not absent:
            return cached
        try:
            early = cached
            if early is None or "config.json" in absent:
                early = self._download(snapshot_download, ["config.json"])
            if (early / "config.json").is_file():
                check(early)
            folder = self._download(snapshot_download)
        except ModelNotFoundError as error:
            if cached is None:
                raise
            raise CheckpointError(
                f"{self}: the Hugging Face cache holds a part of it, without {list_names(absent)}, "
                f"and the rest cannot be downloaded: {error}"
            ) from error
        absent = _absent_files(folder)
        if absent and folder == cached:  # which is what huggingface_hub gives where it has no network
            raise CheckpointError(
                f"{self}: the Hugging Face cache holds a part of it, without {list_names(absent)}, "
                "and the hub did not give the rest"
            )
        if absent:
            raise CheckpointError(f"{self}: got no {list_names(absent)} on the hub, expected a whole model")
        return folder

    def find_configuration(self) -> Path:
        """The folder of its files in the local cache as they are, of which config.json alone is fetched.

        Raises:
            As :meth:`find`.
        """
        snapshot_download = _snapshot_download()
        cached, absent = self._in_cache(snapshot_download)
        if cached is not None and "config.json" not in absent:
            return cached
        return self._download(snapshot_download, ["config.json"], " config.json")

    def _in_cache(self, snapshot_download: Callable[..., str]) -> tuple[Path | None, list[str]]:
        """The folder in the cache, if there is one, and which files it lacks."""
        from huggingface_hub.errors import (
            HFValidationError,
            IncompleteSnapshotError,
            LocalEntryNotFoundError,
        )

        try:
            folder = Path(snapshot_download(**self._request(), local_files_only=True))
        except HFValidationError as error:
            reason = str(error).partition(":")[0]
            raise ModelNotFoundError(
                f"{self}: no such folder, and no name of a model on the hub ({reason})"
            ) from error
        except IncompleteSnapshotError as error:
            folder = Path(error.snapshot_path)
            return folder, _absent_files(folder) or ["some files"]
        except LocalEntryNotFoundError:
            return None, []
        return folder, _absent_files(folder)

    def _download(
        self, snapshot_download: Callable[..., str], files: Sequence[str] = _WANTED, named: str = ""
    ) -> Path:
        """The folder with these files; ``named`` is what of it a user would fetch himself."""
        from huggingface_hub import constants, errors

        absent = f"neither a folder nor in the Hugging Face cache, {constants.HF_HUB_CACHE}"
        fetch = f"fetch it where there is a network: hf download {self.repo_id}{named}"
        if constants.HF_HUB_OFFLINE:
            raise ModelNotFoundError(f"{self}: {absent}, and HF_HUB_OFFLINE is set; {fetch}")
        try:
            return Path(snapshot_download(**self._request(files)))
        except errors.GatedRepoError as error:
            raise ModelNotFoundError(
                f"{self}: the model on the hub is gated, and this machine has no access to it; "
                "accept its terms on its page there, then run: hf auth login"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ModelNotFoundError(
                f"{self}: the model {self.repo_id} on the hub has no revision {self.revision!r}"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ModelNotFoundError(
                f"{self}: no such folder, and no such model on the hub, or a private one, "
                "which needs: hf auth login"
            ) from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            hint = "; what gives access is: hf auth login" if status in (401, 403) else ""
            raise ModelNotFoundError(
                f"{self}: cannot be downloaded, as the hub answered {status}{hint}"
            ) from error
        except errors.LocalEntryNotFoundError as error:
            raise ModelNotFoundError(f"{self}: {absent}, and the hub cannot be reached; {fetch}") from error
        except Exception as error:  # of the network, the disk and the file transfer, of several libraries
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskSpaceError(
                    f"{constants.HF_HUB_CACHE}: no room left on the disk for {self}; "
                    "make room and run the same command again"
                ) from error
            reason = without_credentials(str(error).partition("\n")[0]) or type(error).__name__
            raise ModelNotFoundError(
                f"{self}: cannot be downloaded ({reason}); the same command goes on where it is now"
            ) from error

    def _request(self, files: Sequence[str] = _WANTED) -> dict[str, Any]:
        return {
            "repo_id": self.repo_id,
            "revision": self.revision,
            "allow_patterns": list(files),
            "ignore_patterns": list(_UNWANTED),
        }


def _snapshot_download() -> Callable[..., str]:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingPackageError("huggingface_hub", "model", "host") from error
    except ValueError as error:  # it reads the variable while it is imported
        got = without_credentials(os.environ.get("HF_ENDPOINT", ""))
        raise ConfigError("HF_ENDPOINT", got, "the address of a hub, such as http://10.0.0.1:8080") from error
    download: Callable[..., str] = snapshot_download
    return download


def _absent_files(folder: Path) -> list[str]:
    """What a whole model has and a folder lacks; a link that leads nowhere is a file it lacks."""
    absent = [] if (folder / "config.json").is_file() else ["config.json"]
    if (folder / INDEX).is_file():
        named = load_json(folder / INDEX).get("weight_map")
        files = set(named.values()) if isinstance(named, dict) else set()
        absent += sorted(str(file) for file in files if not (folder / str(file)).is_file())
    elif not any(path.is_file() for path in folder.glob("*.safetensors")):
        absent.append("safetensors files")
    if not any(path.is_file() for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        absent.append("tokenizer")
    return absent
