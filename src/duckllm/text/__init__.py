"""Tokenizer, chat templates and streaming detokenizer; imports nothing else of ours but errors."""
