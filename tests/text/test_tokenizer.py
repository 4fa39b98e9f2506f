from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duckllm.errors import CheckpointError, ModelNotFoundError, RequestError
from duckllm.text import Tokenizer

BOS, EOS, USER, ASSISTANT, SYSTEM = 0, 1, 2, 3, 4


@pytest.fixture(scope="module")
def demo(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer(demo_checkpoint)


@pytest.fixture
def copy(demo_checkpoint: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(demo_checkpoint / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text())
    for key, change in changes.items():
        value.pop(key, None)
        if change is not None:
            value[key] = change
    path.write_text(json.dumps(value))


def add_bos_in_post_processor(folder: Path) -> None:
    edit(
        folder / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}},
        },
    )


def test_template_gives_the_ids_the_model_was_trained_on(demo: Tokenizer) -> None:
    ids = demo.apply_chat_template([{"role": "user", "content": "What is a duck?"}])
    assert ids == [BOS, USER, 269, 268, 263, 1357, 36, ASSISTANT]


def test_a_conversation_closes_each_reply_with_eos(demo: Tokenizer) -> None:
    ids = demo.apply_chat_template(
        [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ]
    )
    a, b, c, d = (demo.encode(char)[1] for char in "abcd")
    assert ids == [BOS, SYSTEM, a, USER, b, ASSISTANT, c, EOS, USER, d, ASSISTANT]


def test_plain_text_begins_with_bos_where_the_template_does(demo: Tokenizer) -> None:
    assert demo.encode("What is a duck?") == [BOS, 269, 268, 263, 1357, 36]
    assert demo.encode("") == [BOS]


@pytest.mark.parametrize("text", ["hi", "<|bos|>hi", "<|bos|><|bos|>hi"])
def test_bos_comes_exactly_once(copy: Path, text: str) -> None:
    for prepare in (lambda folder: None, add_bos_in_post_processor):
        prepare(copy)
        ids = Tokenizer(copy).encode(text)
        assert ids.count(BOS) == 1
        assert ids[0] == BOS


def test_a_template_with_bos_and_a_tokenizer_that_adds_one_make_one(copy: Path) -> None:
    add_bos_in_post_processor(copy)
    ids = Tokenizer(copy).apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids[:2] == [BOS, USER]
    assert ids.count(BOS) == 1


def test_a_template_without_bos_gets_it_from_the_tokenizer_that_adds_one(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", chat_template="{{ '<|user|>' + messages[0]['content'] }}")
    assert Tokenizer(copy).apply_chat_template([{"role": "user", "content": "hi"}])[0] == USER
    assert Tokenizer(copy).encode("hi")[0] != BOS
    add_bos_in_post_processor(copy)
    assert Tokenizer(copy).apply_chat_template([{"role": "user", "content": "hi"}])[:2] == [BOS, USER]


def test_decode_leaves_special_tokens_out(demo: Tokenizer) -> None:
    assert demo.decode([BOS, USER, 269, 268, EOS]) == demo.decode([269, 268]) == "What is"
    assert demo.special_token_ids == frozenset(range(6))


def test_eos_comes_from_both_configurations(copy: Path) -> None:
    assert Tokenizer(copy).eos_token_ids == (EOS,)
    edit(copy / "generation_config.json", eos_token_id=[5, 3])
    assert Tokenizer(copy).eos_token_ids == (EOS, 3, 5)
    (copy / "generation_config.json").unlink()
    assert Tokenizer(copy).eos_token_ids == (EOS,)


def test_spaces_before_punctuation_survive_whatever_the_folder_says(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = Tokenizer(copy)
    assert tokenizer.decode(tokenizer.encode("a , b . don 't")) == "a , b . don 't"


def test_a_missing_template_is_said_when_it_is_needed(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", chat_template=None)
    tokenizer = Tokenizer(copy)
    assert tokenizer.chat_template is None
    assert tokenizer.encode("hi")
    with pytest.raises(CheckpointError, match=r"chat_template: .* has none"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{% for m in messages %}", CheckpointError, "broken one at line 1"),
        ("{{ 1 / 0 }}", CheckpointError, "division by zero"),
        ("{{ raise_exception('roles must alternate') }}", RequestError, "roles must alternate"),
    ],
)
def test_a_template_that_fails_is_a_typed_error(
    copy: Path, template: str, error: type[Exception], message: str
) -> None:
    edit(copy / "tokenizer_config.json", chat_template=template)
    with pytest.raises(error, match=message):
        Tokenizer(copy).apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("name", "field", "value", "expected"),
    [
        ("tokenizer_config", "chat_template", {"a": 1}, "text, or a list of objects with name and template"),
        ("tokenizer_config", "chat_template", [1], "text, or a list of objects with name and template"),
        ("tokenizer_config", "chat_template", [{"name": "a"}], "text, or a list of objects with"),
        ("tokenizer_config", "chat_template", 5, "text, or a list of objects with"),
        ("tokenizer_config", "eos_token", 5, "text, or an object with content"),
        ("tokenizer_config", "bos_token", {"content": 1}, "text, or an object with content"),
        ("tokenizer_config", "additional_special_tokens", [1], "a list of tokens"),
        ("tokenizer_config", "added_tokens_decoder", [1], "an object of tokens by id"),
        ("tokenizer_config", "add_bos_token", "yes", "true or false"),
        ("tokenizer_config", "tokenizer_class", [1], "text"),
        ("special_tokens_map", "eos_token", 5, "text, or an object with content"),
        ("config", "model_type", [1], "text"),
        ("generation_config", "eos_token_id", {"a": 1}, "a token id, or a list of them"),
        ("generation_config", "eos_token_id", [[1]], "a token id, or a list of them"),
        ("generation_config", "eos_token_id", "1", "a token id, or a list of them"),
        ("generation_config", "eos_token_id", True, "a token id, or a list of them"),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_file(
    copy: Path, name: str, field: str, value: object, expected: str
) -> None:
    if name == "special_tokens_map":
        (copy / f"{name}.json").write_text("{}")
    edit(copy / f"{name}.json", **{field: value})
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(copy)
    assert str(caught.value).startswith(f"{copy / name}.json: {field}: got {value!r}, expected {expected}")


def test_a_template_that_is_no_text_is_named(copy: Path) -> None:
    (copy / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: expected text in UTF-8, got .*0xff"):
        Tokenizer(copy)


def test_templates_by_name_are_read(copy: Path) -> None:
    named = [{"name": "default", "template": "hi"}, {"name": "tool_use", "template": "tools"}]
    edit(copy / "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer(copy)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.source == "hi\ntools"
    assert tokenizer.chat_template.render([{"role": "user", "content": "a"}]) == "hi"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: got none"),
        ("hi", "messages: got str"),
        ({"role": "user", "content": "hi"}, "messages: got dict"),
        (["hi"], r"messages\[0\]: got str"),
        ([{"content": "hi"}], r"messages\[0\]\.role: got nothing"),
        ([{"role": "user"}], r"messages\[0\]\.content: got nothing"),
        (
            [{"role": "duck", "content": "hi"}],
            r"messages\[0\]\.role: got 'duck', expected one of system, user",
        ),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": 3}], r"\[1\]\.content: got int"),
        ([{"role": "user", "content": "a\ud800"}], "messages: got an unpaired surrogate"),
    ],
)
def test_a_malformed_conversation_names_the_field(demo: Tokenizer, messages: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        demo.apply_chat_template(messages)  # type: ignore[arg-type]


def test_text_that_is_not_unicode_is_refused(demo: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt: got an unpaired surrogate at character 2"):
        demo.encode("ab\ud800")
    with pytest.raises(RequestError, match="prompt: got int"):
        demo.encode(3)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_used_is_a_typed_error(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="expected a folder that exists"):
        Tokenizer(tmp_path / "nowhere")
    (copy / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="generation_config"):
        Tokenizer(copy)
    (copy / "generation_config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="generation_config"):
        Tokenizer(copy)
    (copy / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer: .* cannot be used") as caught:
        Tokenizer(copy)
    assert "\n" not in str(caught.value)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match="has no tokenizer"):
        Tokenizer(copy)


def test_loading_and_long_texts_print_nothing_and_need_no_network(demo_checkpoint: Path) -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise OSError('no network here')\n"
        "socket.socket.connect = refuse\n"
        "from duckllm.text import Tokenizer\n"
        "tokenizer = Tokenizer(sys.argv[1])\n"
        "assert len(tokenizer.encode('duck ' * 9000)) > 8192\n"
    )
    command = [sys.executable, "-c", code, str(demo_checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == ""
