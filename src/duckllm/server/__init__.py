"""The server: OpenAI's and other APIs over HTTP. Knows requests and the engine's thread, no tensors."""
