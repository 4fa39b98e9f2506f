"""Reads a model folder's tokenizer files, of either kind, without running any code that lies beside them.

Called by :mod:`duckllm.text.tokenizer`. Offline and quiet; whatever is wrong with the files is a typed error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duckllm.errors import CheckpointError, DuckError, ModelNotFoundError, show_value
from duckllm.text.quiet import quiet_transformers
from duckllm.text.tiktoken_bpe import build_tokenizer, find_rank_file

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer with its chat template, as a transformers tokenizer.

    tokenizer.json says everything, and goes first where there is one.

    Raises:
        ModelNotFoundError: There is no such folder, or no tokenizer in it.
        CheckpointError: The tokenizer's files cannot be used.
        UnsupportedModelError: A list of ranks of a family whose pattern is not known.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"model: got {str(folder)!r}, expected a folder that exists")
    has_json = (folder / "tokenizer.json").is_file()
    rank_file = None if has_json else find_rank_file(folder)
    if rank_file is None and not any((folder / name).is_file() for name in _FILES):
        raise ModelNotFoundError(f"model: {folder} has no tokenizer, expected tokenizer.json in it")
    config = _read_config(folder / "tokenizer_config.json")
    _read_config(folder / "special_tokens_map.json")  # of older folders, which transformers reads
    model_type = _read_config(folder / "config.json").get("model_type")
    template = _template_file(folder)
    with quiet_transformers():
        try:
            if rank_file is not None:
                inner = build_tokenizer(rank_file, config, model_type)
                inner.chat_template = _chat_template(config) if template is None else template
            else:
                inner = _from_transformers(folder, whole=has_json and "auto_map" in config)
        except DuckError:
            raise
        except Exception as error:  # transformers raises many kinds for a bad file; the folder is at fault
            raise CheckpointError(f"tokenizer: {folder} cannot be used: {first_line(error)}") from error
    # The context is the engine's to check, with an error and not a warning.
    inner.model_max_length = int(1e30)
    return inner


def read_json_object(path: Path) -> dict[str, Any]:
    """Content of a JSON file; empty if there is no such file.

    Raises:
        CheckpointError: It cannot be read, or is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON object, got {first_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_config(path: Path) -> dict[str, Any]:
    """A file about the tokenizer, its fields of the kinds that are read; null is as if one were absent."""
    config = read_json_object(path)
    for field, value in config.items():
        if value is None or field not in _KINDS:
            continue
        is_right, expected = _KINDS[field]
        if not is_right(value):
            raise wrong_field(path, field, value, expected)
    return config


def wrong_field(path: Path, field: str, got: object, expected: str) -> CheckpointError:
    """A file's field that has a value of another kind."""
    return CheckpointError(f"{path}: {field}: got {show_value(got)}, expected {expected}")


def _is_token(value: object) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _is_template(value: object) -> bool:
    """One as text, or several by name."""
    if isinstance(value, list):
        return all(
            isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("name", "template"))
            for each in value
        )
    return all(isinstance(each, str) for each in (value.values() if isinstance(value, dict) else [value]))


_Kind = tuple[Callable[[object], bool], str]
_TOKEN: _Kind = (_is_token, "text, or an object with content")
_FLAG: _Kind = (lambda value: isinstance(value, bool), "true or false")
# What each field must be that is read, here or by transformers.
_KINDS: dict[str, _Kind] = {
    **dict.fromkeys([f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")], _TOKEN),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space"), _FLAG),
    "additional_special_tokens": (
        lambda value: all(map(_is_token, value if isinstance(value, list) else [value])),
        "a list of tokens, each text or an object with content",
    ),
    "added_tokens_decoder": (lambda value: isinstance(value, dict), "an object of tokens by id"),
    **dict.fromkeys(("tokenizer_class", "model_type"), (lambda value: isinstance(value, str), "text")),
    "chat_template": (_is_template, "text, or a list of objects with name and template"),
}


def first_line(error: BaseException) -> str:
    """The first line of what an error of another library says, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__


def _from_transformers(folder: Path, *, whole: bool) -> Any:
    """As transformers reads it; ``whole``: from tokenizer.json alone, whatever code the folder asks for."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if whole:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _template_file(folder: Path) -> str | None:
    """The template that is a file of its own, and goes before the configuration's, where there is one."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: expected text in UTF-8, got {first_line(error)}") from error


def _chat_template(config: dict[str, Any]) -> Any:
    """The template's source, or several by name."""
    found = config.get("chat_template")
    return {each["name"]: each["template"] for each in found} if isinstance(found, list) else found
