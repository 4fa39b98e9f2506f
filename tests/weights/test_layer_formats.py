"""Which format each layer gets: rules, what a checkpoint has, what is refused, and how it is said."""

from __future__ import annotations

import pytest

from duckllm.errors import ConfigError
from duckllm.weights.layer_formats import LayerNumbers, check_rules, in_words, layer_formats, main_format

LAYERS = LayerNumbers(range(3, 62), 61)  # DeepSeek's: three dense layers, then MoE, one of MTP
PLAIN = dict.fromkeys(range(3, 62), "")


def chosen(*keep: str, weight_format: str = "int4") -> str:
    return in_words(layer_formats(LAYERS, PLAIN, weight_format=weight_format, keep=list(keep) or None))


def test_mtp_layers_stay_in_fp8_by_default_in_4_bits() -> None:
    assert chosen() == "int4, fp8 in layer 61"
    assert chosen("none") == "int4"
    assert chosen(weight_format="int8") == "int8"
    assert chosen(weight_format="auto") == "fp9"
    assert chosen(weight_format="int4-bf16") == "int4-bf16, fp8 in layer 61"


def test_rules_name_layers() -> None:
    assert chosen("fp8:first,last,mtp") == "int4, fp8 in layers 3 and 60-61"
    assert chosen("int8:5-7,9", "fp8:mtp") == "int4, int8 in layers 5-7 and 9, fp8 in layer 61"
    assert chosen("fp8:3-9", "int8:5") == "int4, fp8 in layers 3-4, 6-9 and 61, int8 in layer 5"
    assert chosen("none", "fp9:0-3") == "int4, fp9 in layer 3"
    assert chosen("none", "fp8:0-61") == "fp8"


def test_a_range_may_end_with_a_layer_without_experts() -> None:
    layers = LayerNumbers([1, 2], 4)  # the last of four layers is dense
    plain = dict.fromkeys(layers.moe_layers, "")
    assert layer_formats(layers, plain, keep=["fp8:0-3"]) == {1: "fp8", 2: "fp8"}
    with pytest.raises(ConfigError, match=r"keep: got '0-4', .*this model's are 1 to 2"):
        layer_formats(layers, plain, keep=["fp8:0-4"])


def test_rules_for_other_layers_leave_mtp_in_fp8() -> None:
    assert chosen("fp8:first,last") == "int4, fp8 in layers 3 and 60-61"
    assert chosen("int8:mtp") == "int4, int8 in layer 61"
    assert chosen("none", "fp8:first") == chosen("fp8:first", "none") == "int4, fp8 in layer 3"
    assert chosen("fp8:first", weight_format="int8") == "int8, fp8 in layer 3"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("fp8", "keep: got 'fp8', expected none, or FORMAT:LAYERS with one of fp9, fp8, int8"),
        ("int4:mtp", "keep: got 'int4:mtp', expected none, or FORMAT:LAYERS"),
        ("fp8:middle", "keep: got 'middle', expected first, last, mtp, or numbers"),
        ("fp8:0-2", "keep: got '0-2', .*this model's are 3 to 61"),
        ("fp8:-1", "keep: got '-1', expected first"),
        ("int8:0-999", "keep: got '0-999', expected first, .*this model's are 3 to 61"),
        ("int8:5,61-62", "keep: got '61-62', .*this model's are 3 to 61"),
        ("int8:7-3", "keep: got '7-3', .*this model's are 3 to 61"),
    ],
)
def test_rules_that_are_none(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(rule)


def test_4_bit_experts_are_kept() -> None:
    kept = PLAIN | dict.fromkeys(range(3, 61), "int4-bf16")
    assert in_words(layer_formats(LAYERS, kept)) == "int4-bf16, fp9 in layer 61"
    assert in_words(layer_formats(LAYERS, kept, weight_format="int4-bf16")) == "int4-bf16, fp8 in layer 61"
    with pytest.raises(ConfigError, match="got 'fp8', expected auto or int4-bf16, in which"):
        layer_formats(LAYERS, kept, weight_format="fp8")
    with pytest.raises(ConfigError, match="format: got 'fp8', expected auto or int4-bf16"):
        layer_formats(LAYERS, kept, weight_format="int4-bf16", keep=["fp8:first"])
    assert in_words(layer_formats(LAYERS, kept, weight_format="fp8", requantise=True)) == "fp8"
    every = dict.fromkeys(range(3, 62), "mxfp4")
    assert in_words(layer_formats(LAYERS, every, weight_format="mxfp4")) == "mxfp4"
    assert in_words(layer_formats(LAYERS, every, weight_format="auto")) == "mxfp4"


def test_formats_that_nothing_is_rounded_to() -> None:
    for name in ("mxfp4", "int4-zero"):
        message = f"format: got '{name}', expected auto, fp9, .*no weights are rounded"
        with pytest.raises(ConfigError, match=message):
            layer_formats(LAYERS, PLAIN, weight_format=name)
    with pytest.raises(ConfigError, match="format: got 'int3', expected one of auto, fp9, fp8, int8, int4"):
        layer_formats(LAYERS, PLAIN, weight_format="int3")


def test_the_format_of_most_layers() -> None:
    assert main_format({1: "int4", 2: "fp8"}) == "int4"
    assert main_format({1: "fp8", 2: "int4", 3: "int4"}) == "int4"
    assert main_format({}) == "fp9"


@pytest.mark.parametrize(
    ("weight_format", "keep"),
    [
        ("int4", ["fp8:first"]),
        ("int4", ["fp8:mtp"]),  # as without it, but said
        ("int4", ["none"]),
        ("int4", ["none", "fp8:0-61"]),
        ("int4", ["fp8:3-9", "int8:5"]),
        ("fp9", ["fp8:first,last", "int8:mtp"]),
        ("int8", ["fp8:mtp"]),
        ("fp8", []),
        ("fp8", None),
    ],
)
def test_rules_that_change_something(weight_format: str, keep: list[str] | None) -> None:
    check_rules(LAYERS, PLAIN, weight_format=weight_format, keep=keep)


@pytest.mark.parametrize(
    ("weight_format", "keep", "refused"),
    [
        ("fp9", ["fp9:first"], "fp9:first"),
        ("auto", ["fp9:3-7"], "fp9:3-7"),
        ("int8", ["int8:first", "fp8:last"], "int8:first"),
        ("fp8", ["none"], "none"),
        ("int4", ["fp8:first", "fp8:first"], "fp8:first"),
        ("int4", ["int8:5", "fp8:3-9"], "int8:5"),
        ("int8", ["fp8:first", "int8:first"], "fp8:first"),
    ],
)
def test_rules_that_change_nothing_are_refused_by_name(
    weight_format: str, keep: list[str], refused: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(LAYERS, PLAIN, weight_format=weight_format, keep=keep)
    expected = "a rule that changes a layer's format (each layer has the same format without it)"
    assert str(caught.value) == f"keep: got {refused!r}, expected {expected}"


def test_rules_for_layers_of_multi_token_prediction_of_a_model_without_them_are_refused() -> None:
    layers, plain = LayerNumbers(range(3), 3), dict.fromkeys(range(3), "")
    for rule in ("fp8:mtp", "none"):
        with pytest.raises(ConfigError, match=f"keep: got '{rule}', expected a rule that changes"):
            check_rules(layers, plain, weight_format="int4", keep=[rule])
    check_rules(layers, plain, weight_format="int4", keep=["fp8:first,mtp"])  # a recipe for many models


def test_rules_beside_what_a_checkpoint_has_in_4_bits() -> None:
    kept = dict.fromkeys(range(3, 61), "mxfp4") | {61: ""}
    check_rules(LAYERS, kept, keep=["fp8:mtp"])
    for rule in ("fp9:mtp", "none"):
        with pytest.raises(ConfigError, match=f"keep: got '{rule}', expected a rule that changes"):
            check_rules(LAYERS, kept, keep=[rule])
