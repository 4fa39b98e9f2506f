"""What a machine, its workers and the way to them are like, and what to change: ``duckllm doctor``.

Facts are gathered apart from what they mean: each check is a function from facts to a finding. Imports no
torch and changes nothing.
"""
