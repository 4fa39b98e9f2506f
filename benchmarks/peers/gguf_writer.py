"""Writes a random checkpoint as GGUF Q8_0 for llama.cpp: started by whole_model.py in the peers' environment.

    python gguf_writer.py CHECKPOINT FILE

Every matrix is dequantised, its e4m3 codes times their scales, and quantised to Q8_0 as llama.cpp's own
converter does it; norms and routers stay float32, as there. The tokenizer is a list of names, one a token.
NumPy and gguf only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
ARCHITECTURE = "qwen3moe"
BLOCK = 128
NUM_BYTES = 256
SPECIAL = ("<unk>", "<s>", "</s>")
# llama.cpp's name of a tensor, and whether it stays float32.
IN_LAYERS = {
    "input_layernorm": ("attn_norm", True),
    "self_attn.q_proj": ("attn_q", False),
    "self_attn.k_proj": ("attn_k", False),
    "self_attn.v_proj": ("attn_v", False),
    "self_attn.o_proj": ("attn_output", False),
    "self_attn.q_norm": ("attn_q_norm", True),
    "self_attn.k_norm": ("attn_k_norm", True),
    "post_attention_layernorm": ("ffn_norm", True),
    "mlp.gate": ("ffn_gate_inp", True),
}
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def e4m3_values() -> F32:
    """The number of each e4m3 code: [256] f32."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values = np.where(codes & 128, -sizes, sizes)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


class Checkpoint:
    """Reads the tensors of a checkpoint in float32.

    Args:
        folder: The checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        where: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())[
            "weight_map"
        ]
        self._values = e4m3_values()
        self._tensors: dict[str, tuple[U8, int, dict[str, Any]]] = {}
        for file in sorted(set(where.values())):
            data = np.memmap(folder / file, np.uint8, "r")
            length = int(data[:8].view(np.uint64)[0])
            header = json.loads(bytes(data[8 : 8 + length]))
            header.pop("__metadata__", None)
            self._tensors |= {name: (data, 8 + length, entry) for name, entry in header.items()}

    def _raw(self, name: str) -> tuple[U8, str, list[int]]:
        data, start, entry = self._tensors[name]
        first, last = entry["data_offsets"]
        return data[start + first : start + last], entry["dtype"], entry["shape"]

    def get(self, name: str) -> F32:
        """The tensor, dequantised."""
        raw, dtype, shape = self._raw(name)
        if dtype == "F32":
            return raw.view(np.float32).reshape(shape)
        if dtype == "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        rows, columns = shape
        scales = self.get(f"{name}_scale_inv").repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
        values: F32 = self._values[raw].reshape(shape) * scales
        return values

    def experts(self, layer: int, projection: str) -> Iterator[str]:
        """Names of one matrix of all experts of a layer."""
        for expert in range(self.config["num_experts"]):
            yield f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"


def quantised(values: F32) -> U8:
    """Blocks of Q8_0, row by row."""
    blocks: U8 = gguf.quants.quantize(values, Q8_0)
    return blocks


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes what llama.cpp has to know of the model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]
    words = [f"w{number}" for number in range(config["vocab_size"] - len(SPECIAL) - len(bytes_))]
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*SPECIAL, *bytes_, *words])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types(
        [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * NUM_BYTES, *[kind.NORMAL] * len(words)]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


class GgufTensors:
    """The tensors of the file in its order, each announced before any is written.

    Args:
        checkpoint: Where they come from.
        writer: Where they go.
    """

    def __init__(self, checkpoint: Checkpoint, writer: gguf.GGUFWriter) -> None:
        self._checkpoint, self._writer = checkpoint, writer
        self._making: list[Callable[[], F32 | U8]] = []
        matrices = (("token_embd", "model.embed_tokens"), ("output", "lm_head"))
        for theirs, ours in matrices:
            self._matrices(f"{theirs}.weight", [f"{ours}.weight"])
        self._plain("output_norm.weight", "model.norm.weight")
        for layer in range(checkpoint.config["num_hidden_layers"]):
            for ours, (theirs, stays) in IN_LAYERS.items():
                name, source = f"blk.{layer}.{theirs}.weight", f"model.layers.{layer}.{ours}.weight"
                self._plain(name, source) if stays else self._matrices(name, [source])
            for which in ("gate", "up", "down"):
                names = list(checkpoint.experts(layer, f"{which}_proj"))
                self._matrices(f"blk.{layer}.ffn_{which}_exps.weight", names, stacked=True)

    def _plain(self, name: str, source: str) -> None:
        values = self._checkpoint.get(source)
        self._writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        self._making.append(lambda: values)

    def _matrices(self, name: str, sources: list[str], stacked: bool = False) -> None:
        rows, columns = self._checkpoint._raw(sources[0])[2]
        block, block_bytes = gguf.GGML_QUANT_SIZES[Q8_0]
        size = (*([len(sources)] if stacked else []), rows, columns // block * block_bytes)
        self._writer.add_tensor_info(name, size, np.dtype(np.uint8), int(np.prod(size)), Q8_0)
        self._making.append(lambda: self._quantised(sources).reshape(size))

    def _quantised(self, sources: list[str]) -> U8:
        with ThreadPoolExecutor() as pool:
            parts = list(pool.map(lambda source: quantised(self._checkpoint.get(source)), sources))
        return np.stack(parts)

    def write(self, progress: Callable[[int, int], None]) -> None:
        """Makes and writes them, one at a time."""
        for done, make in enumerate(self._making):
            progress(done, len(self._making))
            self._writer.write_tensor_data(make())


def main() -> None:
    checkpoint, path = Checkpoint(Path(sys.argv[1])), Path(sys.argv[2])
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    describe(writer, checkpoint.config)
    tensors = GgufTensors(checkpoint, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    tensors.write(lambda done, count: print(f"tensor {done + 1} of {count}", file=sys.stderr, flush=True))
    writer.close()


if __name__ == "__main__":
    main()
