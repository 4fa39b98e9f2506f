"""``duckllm calibrate``: which of the experts' weights matter for a user's prompts, for the converter.

Mounted by cli/main.py. Parses its options and prints; duckllm/quality runs the prompts and writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duckllm.cli.bench_common import CellProgress, check_environment, check_save, writing
from duckllm.cli.common import Waiting, refuse_unused
from duckllm.cli.model_options import ModelArgument
from duckllm.cli.quality import is_demo_model
from duckllm.config import MAX_STEP_TOKENS, count_of, show_size
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.quality.texts import Passage

EXAMPLES = """\b
Examples:
  duckllm calibrate -o demo.calibration.safetensors
  duckllm calibrate /checkpoints/mine --prompts prompts.jsonl -o mine.calibration.safetensors
"""


def calibrate(
    model: ModelArgument = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File to write, one that is not there yet.",
            show_default=False,
            readable=False,
        ),
    ] = ...,  # type: ignore[assignment]
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A text, or prompts, one a line, in a file that ends in .jsonl: strings, or objects with "
            "prompt or messages; by default prompts that ship.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(help="Tokens that are recorded, at most; all of them are computed in one step."),
    ] = 4096,
    window: Annotated[int, typer.Option(help="Tokens of a piece of a text.")] = 512,
    reply_tokens: Annotated[
        int, typer.Option(help="Tokens of the model's own reply behind a prompt that has none; 0 for none.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")] = False,
) -> None:
    """Run prompts through a model and record how much each of its experts' weights matters for them.

    The file has the mean square of what the experts' matrices are multiplied by. duckllm convert takes it
    with --importance and rounds the weights that matter most with the least error. The experts are computed
    in this process, from a model in fp9 or fp8, into which a checkpoint is converted first.
    """
    from duckllm import LLM
    from duckllm.models.registry import open_model
    from duckllm.quality.calibrate import StoredExperts, cut
    from duckllm.quality.calibrate import calibrate as run
    from duckllm.quality.importance import Importance
    from duckllm.quality.texts import MIN_WINDOW, check_readable, read_passages, shipped_passages
    from duckllm.text import Tokenizer

    check_environment()
    for field, value, least, most in (
        ("tokens", tokens, 2, MAX_STEP_TOKENS),
        ("window", window, MIN_WINDOW, MAX_STEP_TOKENS),
        ("reply_tokens", reply_tokens, 0, 1024),
    ):
        if not least <= value <= most:
            raise ConfigError(field, value, f"a number from {least} to {most}")
    if prompts is None or prompts.suffix == ".jsonl":
        refuse_unused(calibrate, {"window": window}, "nothing without --prompts of a text that is cut")
    else:
        what = "nothing with a text, to which nothing is replied"
        refuse_unused(calibrate, {"reply_tokens": reply_tokens}, what)
    check_save(output, "output")
    if output.exists():  # minutes of work, and what conversions were made with
        raise ConfigError("output", str(output), "the name of a file that is not there yet")
    if prompts is not None:
        check_readable("prompts", prompts)  # before a checkpoint is converted
    opened = open_model(model)
    manifest = opened.manifest
    stored = StoredExperts(manifest)
    with Waiting("Reading prompts"):
        tokenizer = Tokenizer(opened.path)
        passages = (
            shipped_passages(tokenizer, is_demo=is_demo_model(opened))
            if prompts is None
            else read_passages(prompts, tokenizer, window=window, field="prompts")
        )
    draft = "on" if opened.has_draft_layer else "off"
    importance = Importance(manifest.hidden_size, manifest.moe_intermediate_size, manifest.num_experts)
    with (
        CellProgress() as progress,
        LLM(opened.path, workers=0, device="cpu", lanes="off", draft=draft, max_step_tokens=tokens) as llm,
    ):
        chosen = cut(_answered(llm, passages, tokens, reply_tokens, progress), tokens, llm.max_model_len)
        calibrated, draft_layer = llm.host_model()
        run(calibrated, draft_layer, chosen, stored.gate_up, importance, progress)
    num_tokens = sum(len(each.token_ids) for each in chosen)
    with writing("output", output):
        importance.save(output, manifest.config_sha256, num_tokens)
    sums = importance.layers.values()
    unseen = sum(int((each.counts == 0).sum()) for each in sums)
    outcome = {
        "file": str(output),
        "bytes": output.stat().st_size,
        "num_tokens": num_tokens,
        "num_passages": len(chosen),
        "layers": len(sums),
        "experts": sum(len(each.counts) for each in sums),
        "experts_never_chosen": unseen,
    }
    if as_json:
        print(json.dumps(outcome))
        return
    print(
        f"{output}: {num_tokens} tokens of {count_of(len(chosen), 'passage')}, {len(sums)} layers, "
        f"{show_size(output.stat().st_size)}; {never_chosen(unseen, sum(len(each.counts) for each in sums))}"
    )


def never_chosen(unseen: int, experts: int) -> str:
    """How many of all experts no token chose, for people."""
    if not unseen:
        return f"each of {count_of(experts, 'expert')} was chosen"
    return f"{unseen} of {count_of(experts, 'expert')} {'was' if unseen == 1 else 'were'} never chosen"


def _answered(
    llm: LLM, passages: list[Passage], tokens: int, reply_tokens: int, progress: CellProgress
) -> list[Passage]:
    """Passages with the model's own replies where they have none, as many as will be taken."""
    from duckllm.quality.texts import spread
    from duckllm.sampling_params import SamplingParams

    if not reply_tokens or not any(each.is_open for each in passages):
        return passages
    chosen = spread(passages, tokens, reply_tokens)
    found = []
    for number, each in enumerate(chosen):
        progress("replies", number, len(chosen))
        room = min(reply_tokens, llm.max_model_len - len(each.token_ids))
        if each.is_open and room > 0:
            params = SamplingParams(temperature=0, max_tokens=room)
            (output,) = llm.generate([list(each.prompt)], params)
            found.append(each.with_reply(output.outputs[0].token_ids))
        else:
            found.append(each)
    return found
