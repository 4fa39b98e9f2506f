"""duck-llm: large mixture-of-experts models, attention on one host, routed experts on cheap CPU machines."""

__version__ = "0.1.0"
