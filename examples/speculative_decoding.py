"""Speculative decoding by prompt lookup: a draft is what followed the last tokens when they occurred before.

The executor verifies a draft in one step and returns the accepted tokens and one more. The text is that of single
decodes, however bad the drafts are.
"""

import sys

from ferrum_rpc.client import Accept
from ferrum_rpc.client.sync import ExecutorClient


def draft(text: list[int], match: int = 4, size: int = 6) -> list[int]:
    """What followed the last ``match`` tokens where they occurred last, or nothing."""
    for at in range(len(text) - match - 1, -1, -1):
        if text[at : at + match] == text[-match:]:
            return text[at + match : at + match + size]
    return []


def main(target: str, prompt: str) -> None:
    """Write 96 tokens greedily."""
    with ExecutorClient(target) as client, client.sequence() as sequence:
        text = list(prompt.encode())
        text.append(sequence.prefill(text).token)
        steps = 0
        while len(text) < len(prompt.encode()) + 96:
            guess = draft(text)
            text += sequence.verify([text[-1], *guess], Accept()).tokens.tolist()
            steps += 1
        print(bytes(token for token in text if token < 256).decode(errors="replace"))
        print(f"{len(text) - len(prompt.encode())} tokens in {steps + 1} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
