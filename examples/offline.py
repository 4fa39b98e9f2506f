"""Ask the demo model from Python: a batch of prompts, a conversation, and a reply as it grows.

Run: ``python examples/offline.py`` (two worker processes on this machine; no GPU, no network).
"""

from duckllm import LLM, SamplingParams


def main() -> None:
    """Prints three kinds of answers."""
    with LLM(workers=2) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=100)

        conversations = [
            [{"role": "user", "content": question}] for question in ("What is a duck?", "Is 1001 prime?")
        ]
        for output in llm.chat(conversations, greedy):
            print(output.outputs[0].text, f"({output.outputs[0].finish_reason})")

        messages = [
            {"role": "user", "content": "What is a goose?"},
            {"role": "assistant", "content": "noun: web-footed long-necked typically gregarious bird"},
            {"role": "user", "content": "What was my first question?"},
        ]
        for output in llm.stream(messages, greedy):
            print(output.text, end="", flush=True)
        print()

        sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20)
        [output] = llm.generate("A duck is", sampled)
        print(f"{len(output.outputs[0].token_ids)} tokens: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
