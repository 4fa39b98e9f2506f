"""The markup of conversations and replies: known families, DeepSeek-V3.2's own prompts, parsers."""
