"""A text begins with one BOS or with none, whoever adds it: never with two."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from duckllm.text import Tokenizer
from support.tokenizers import trained_tokens, write_byte_fallback, write_kimi

HI = [{"role": "user", "content": "hi"}]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def byte_level(folder: Path) -> str:
    backend = Backend(models.BPE({char: n for n, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return "<|bos|>"


def byte_fallback(folder: Path) -> str:
    write_byte_fallback(folder)
    set_post_processor(folder, None)
    return "<s>"


def kimi(folder: Path) -> str:
    write_kimi(folder, trained_tokens())
    return "[BOS]"


def set_post_processor(folder: Path, bos: str | None) -> None:
    path = str(folder / "tokenizer.json")
    backend = Backend.from_file(path)
    single, special = ("$A", []) if bos is None else (f"{bos} $A", [(bos, backend.token_to_id(bos))])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    backend.save(path)


def leading_bos(tokenizer: Tokenizer, ids: list[int]) -> int:
    count = next((n for n, token_id in enumerate(ids) if token_id != tokenizer.bos_token_id), len(ids))
    assert tokenizer.bos_token_id not in ids[count:]
    return count


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, kimi])
def test_one_bos_whoever_adds_it(kind: Any, tmp_path: Path) -> None:
    for number, (flag, processor, template) in enumerate(
        product([False, True], [False, True], [None, "without", "with"])
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        bos = kind(folder)
        if processor and kind is kimi:
            continue  # it has no file for one
        if processor:
            set_post_processor(folder, bos)
        templates = {"without": "{{ messages[0].content }}", "with": "{{ bos_token + messages[0].content }}"}
        edit_config(folder, add_bos_token=flag, chat_template=templates.get(template or ""))
        tokenizer = Tokenizer(folder)
        case = (flag, processor, template)
        # False leaves a post-processor of the file as it is, as in transformers.
        expected = int(flag is True or processor or template == "with")
        assert leading_bos(tokenizer, tokenizer.encode("hi")) == expected, case
        assert leading_bos(tokenizer, tokenizer.encode(f"{bos}hi")) == 1, case
        assert leading_bos(tokenizer, tokenizer.encode(f"{bos}{bos}hi")) == 1, case
        assert tokenizer.decode(tokenizer.encode(f"{bos}hi")) == "hi", case
        if template is not None:
            assert leading_bos(tokenizer, tokenizer.apply_chat_template(HI)) == expected, case


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, kimi])
def test_a_tokenizer_without_bos_adds_none(kind: Any, tmp_path: Path) -> None:
    bos = kind(tmp_path)
    edit_config(tmp_path, bos_token=None, chat_template="{{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("hi") == tokenizer.apply_chat_template(HI)
    [first, *rest] = tokenizer.encode(f"{bos}hi")
    assert tokenizer.decode([first]) == ""
    assert first not in rest


def test_bos_inside_a_text_stays(tmp_path: Path) -> None:
    bos = byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode(f"{bos}a{bos}{bos}b")
    assert [n for n, token_id in enumerate(ids) if token_id == tokenizer.bos_token_id] == [0, 2, 3]
