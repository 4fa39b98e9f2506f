"""What templates write says what they can do and how their models mark calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duckllm.text.chat_template import JinjaTemplate
from duckllm.text.formats import known
from duckllm.text.formats.deepseek_v32 import DeepseekV32Template
from duckllm.text.formats.markup import ReasoningMarkup
from duckllm.text.formats.traits import TemplateTraits, traits_of
from duckllm.text.loading import load_tokenizer
from support.tokenizers import trained_tokens, write_kimi

TEMPLATES = Path(__file__).parent / "templates"
KIMI_THINKS = ReasoningMarkup(after_begin="", before_end="", after_end="")
GLM_THINKS = ReasoningMarkup(after_begin="", before_end="", after_end="\n")
SWITCH = {"switches": ("enable_thinking",), "options": frozenset({"enable_thinking"})}
NATIVE = {"writes_tools": True, "writes_calls": True}
EXPECTED = {
    "qwen3": TemplateTraits(known.HERMES, ReasoningMarkup(), takes_text=True, **NATIVE, **SWITCH),
    "glm-4.6": TemplateTraits(known.GLM_4_5, GLM_THINKS, takes_text=False, **NATIVE, **SWITCH),
    "kimi-k2": TemplateTraits(known.KIMI_K2, KIMI_THINKS, takes_text=True, **NATIVE),
    "deepseek-r1": TemplateTraits(known.DEEPSEEK_V3, ReasoningMarkup(), writes_calls=True),
    "deepseek-v3.1": TemplateTraits(
        known.DEEPSEEK_V3_1,
        ReasoningMarkup(),
        writes_calls=True,
        switches=("thinking",),
        options=frozenset({"thinking"}),
    ),
    "qwen3-coder": TemplateTraits(known.QWEN3_CODER, None, takes_text=False, **NATIVE),
    "mistral": TemplateTraits(known.MISTRAL, None, takes_text=False, takes_system=False, **NATIVE),
    "mixtral": TemplateTraits(known.HERMES, None, takes_system=False),
}


@pytest.fixture(scope="module")
def inner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(write_kimi(tmp_path_factory.mktemp("kimi"), trained_tokens()))


def template_of(inner: Any, text: str) -> JinjaTemplate:
    inner.chat_template = text
    return JinjaTemplate(inner, Path("a folder"))


@pytest.mark.parametrize("name", EXPECTED)
def test_templates_of_the_families(inner: Any, name: str) -> None:
    template = template_of(inner, (TEMPLATES / f"{name}.jinja").read_text())
    assert traits_of(template) == EXPECTED[name]


def test_a_broken_template_is_taken_as_none(inner: Any) -> None:
    for text in ("{% for %}", "{{ 1 // 0 }}", "{{ raise_exception('no') }}"):
        assert traits_of(template_of(inner, text)) == TemplateTraits()


def test_options_are_what_a_template_looks_up(inner: Any) -> None:
    text = (
        "{% set ns = namespace(a=1) %}{% for m in messages %}{% set b = m.role %}{{ b }}{% endfor %}"
        "{% if not c is defined %}{% set c = 1 %}{% endif %}{{ c }}{% if d is defined %}{{ d }}{% endif %}"
        "{{ e | default('') }}{{ bos_token }}{% macro f(g) %}{{ g }}{% endmacro %}{{ f(1) }}"
        "{{ strftime_now('') }}{% generation %}{{ h }}{% endgeneration %}"
        "{% for i in range(3) %}{% break %}{% endfor %}{{ tools }}"
    )
    assert template_of(inner, text).variables == {"c", "d", "e", "h"}


def test_deepseek_v32() -> None:
    traits = traits_of(DeepseekV32Template())
    assert traits.markup is known.DEEPSEEK_V3_2
    assert traits.reasoning == ReasoningMarkup(after_begin="", before_end="", after_end="")
    assert traits.writes_tools
    assert traits.writes_calls
    assert not traits.takes_text
    assert traits.switches == ("enable_thinking", "thinking")


def test_without_a_template_nothing_is_known() -> None:
    assert traits_of(None) == TemplateTraits()
