"""What the families' chat templates make use of, in small templates of our own."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from duckllm.errors import RequestError
from duckllm.text import Tokenizer
from support.tokenizers import trained_tokens, write_kimi

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Quack?"},
    {"role": "assistant", "content": "<think>hm</think>\n\nQuack."},
    {"role": "user", "content": '鸭子 "x" <b>&\''},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi(tmp_path_factory.mktemp("templates"), trained_tokens())


def render(folder: Path, template: str) -> str:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(folder)
    return tokenizer.decode(tokenizer.apply_chat_template(CONVERSATION))


def test_deepseek_manner(folder: Path) -> None:
    """A namespace that collects system prompts first, tests for what is undefined, split at </think>."""
    template = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(system='', first=true, last_user=false) %}
{%- for message in messages %}{% if message['role'] == 'system' %}
{%- if ns.first %}{% set ns.system = ns.system + message['content'] %}{% set ns.first = false %}
{%- else %}{% set ns.system = ns.system + '\\n\\n' + message['content'] %}{% endif %}
{%- endif %}{% endfor %}
{{- ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{% set ns.last_user = true %}{{ '(U)' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is not defined %}
{%- set ns.last_user = false %}{% set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}
{{- '(A)' + content + '(E)' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.last_user %}
{{- '(A)' }}{% if thinking %}T{% else %}/T{% endif %}{% endif %}
"""
    expected = 'Be brief.(U)Quack?(A)\n\nQuack.(E)(U)鸭子 "x" <b>&\'(A)/T'
    assert render(folder, template) == expected


def test_kimi_manner(folder: Path) -> None:
    """A macro, string and sequence tests, tojson with separators, trimmed blocks."""
    template = """
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}{%- endmacro -%}
{%- if tools -%}{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}default{%- endif -%}
  {%- set name = message.get('name') or message.role -%}
  [{{ name }}]{{ text_of(message.content) }};
{%- endfor -%}
{{ {'a': '鸭<b>', 'b': [1, none, true]} | tojson(separators=(',', ':')) }}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}
"""
    expected = "".join(f"[{message['role']}]{message['content']};" for message in CONVERSATION)
    assert render(folder, template) == expected + '{"a":"鸭<b>","b":[1,null,true]}[assistant]'


def test_qwen_manner(folder: Path) -> None:
    """Walks backwards by a slice, strips, looks ahead by index, and closes an empty thought."""
    template = """
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == 'user' and message.content is string
    and not (message.content.startswith('<r>') and message.content.endswith('</r>')) %}
{%- set ns.multi_step_tool = false %}{% set ns.last = index %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- if loop.index0 > ns.last or (loop.last and thought) %}!{{ thought }}{% endif %}
{%- endif %}
{{- '(' + message.role + ')' + content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '(assistant)' }}
{%- if enable_thinking is defined and enable_thinking is false %}(no thought){% endif %}{% endif %}
"""
    expected = '(system)Be brief.\n(user)Quack?\n(assistant)Quack.\n(user)鸭子 "x" <b>&\'\n(assistant)'
    assert render(folder, template) == expected


def test_glm_manner(folder: Path) -> None:
    """Tojson that keeps letters, {% generation %}, break and continue."""
    template = """[g]
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{%- if message.role == 'assistant' %}{% generation %}a:{{ message.content[-6:] | trim }}{% endgeneration %}
{%- else %}
u:{{ message.content | tojson(ensure_ascii=False) }}
{%- endif %}
{%- if loop.index0 == 2 %}{% break %}{% endif %}
{%- endfor %}"""
    assert render(folder, template) == '[g]u:"Quack?"a:Quack.'


def test_todays_date(folder: Path) -> None:
    before = datetime.date.today().isoformat()
    text = render(folder, "{{ strftime_now('%Y-%m-%d') }}")
    assert text in {before, datetime.date.today().isoformat()}


def test_a_template_may_refuse(folder: Path) -> None:
    template = "{% if messages|length > 3 %}{{ raise_exception('at most three') }}{% endif %}"
    with pytest.raises(RequestError, match="the model's chat template refuses them: at most three"):
        render(folder, template)


def test_special_tokens_of_the_tokenizer_are_variables(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content + eos_token + pad_token }}")
    tokenizer = Tokenizer(folder)
    eos, pad = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])[1:]
    assert (eos,) == tokenizer.eos_token_ids
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"][str(pad)]["content"] == "[PAD]"
