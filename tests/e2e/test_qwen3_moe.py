"""A whole Qwen3-MoE: a checkpoint with a tokenizer, through worker processes, against transformers."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import transformers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from duckllm import LLM, SamplingParams
from parity.test_gqa_models import BY_NAME
from support.families import write_model
from support.reference import load_reference, reference_greedy

SPEC = BY_NAME["qwen3-yarn"]
EOS = 1
PROMPTS = ("w5 w17 w3 w120 w44 w9", "w80", " ".join(f"w{word}" for word in range(2, 60)))


def write_tokenizer(folder: Path) -> None:
    """One word a token."""
    words = ["<s>", "</s>", *(f"w{word}" for word in range(2, SPEC.config["vocab_size"]))]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    inner = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="w2"))
    inner.pre_tokenizer = Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(folder)


def test_replies_through_workers_are_the_references(tmp_path: Path, model_cache: Path) -> None:
    """The checkpoint is named as it is, and converted on the way."""
    checkpoint = tmp_path / "checkpoint"
    write_model(checkpoint, SPEC, seed=3)
    write_tokenizer(checkpoint)
    reference = load_reference(checkpoint, transformers.Qwen3MoeForCausalLM)
    with LLM(checkpoint, workers=2) as llm:
        outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=64))
        assert llm.cluster_info().num_workers == 2
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        token_ids = [int(word[1:]) for word in prompt.split()]
        assert list(output.prompt_token_ids) == token_ids
        expected = reference_greedy(reference, token_ids, 64, EOS)
        assert list(output.outputs[0].token_ids) == expected
        assert len(set(expected)) > 10
        assert output.outputs[0].text.split() == [f"w{each}" for each in expected]
