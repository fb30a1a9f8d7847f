"""A chat on one sequence: a turn feeds only what is new, and its answer is printed while it is computed.

The tokens of the demo model are bytes. With another model use its tokenizer and its chat template.
"""

import sys

from ferrum_rpc.client import Sample
from ferrum_rpc.client.sync import ExecutorClient


def main(target: str, *turns: str) -> None:
    """Send the turns one after the other."""
    with ExecutorClient(target) as client, client.sequence() as chat:
        fed_next: list[int] = []  # the token that was chosen last is not in the cache yet
        for number, turn in enumerate(turns):
            print(f"{turn}", end="", flush=True)
            output = Sample(temperature=0.7, top_p=0.95, seed=number)
            for each in chat.stream([*fed_next, *turn.encode()], max_tokens=48, output=output):
                if each.token < 256:
                    sys.stdout.buffer.write(bytes([each.token]))
                    sys.stdout.flush()
                fed_next = [each.token]
            print(f"\n[{each.finish_reason}; {chat.length} tokens in the cache]")


if __name__ == "__main__":
    main(*sys.argv[1:])
