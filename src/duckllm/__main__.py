"""``python -m duckllm``: the same command line as ``duckllm``."""

from duckllm.cli.main import main

if __name__ == "__main__":
    main()
