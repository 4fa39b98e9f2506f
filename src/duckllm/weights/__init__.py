"""Weight formats, packing, reading, and conversion from Hugging Face checkpoints."""
