"""What a format of the experts costs in answers, and which of a model's weights matter most for prompts."""
