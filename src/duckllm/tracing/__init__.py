"""Traces of steps: the file that a run writes, what it says, and heat maps of it.

Called by :mod:`duckllm.llm`, which hands the writer to the parts that have something to note, and by
cli/trace.py, which reads files. Knows no model and no worker, only moments.
"""
