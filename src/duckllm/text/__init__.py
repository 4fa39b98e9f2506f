"""Text in and out: the tokenizer with its chat template, the streaming detokenizer, stop strings.

Called by the engine and by the command line; knows token ids and strings, no tensors and no sockets.
"""

from duckllm.text.detokenizer import StreamingDetokenizer
from duckllm.text.tokenizer import Tokenizer

__all__ = ["StreamingDetokenizer", "Tokenizer"]
