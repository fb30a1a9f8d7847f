"""A scheduler with continuous batching, chunked prefill and preemption. `ferrum_rpc.scheduler` is a complete one."""

import asyncio
import sys
from collections import deque

from ferrum_rpc.client import ExecutorClient, KvBlocksExhausted, OutputSpec, Positions

BUDGET = 64  # tokens of a step: this bounds how long a long prompt delays the other texts


class Text:
    """A text that is being written: its tokens, how many of them are in the cache, and how long it becomes."""

    def __init__(self, client: ExecutorClient, prompt: str) -> None:
        self.sequence, self.tokens, self.fed = client.sequence(), list(prompt.encode()), 0
        self.end = len(self.tokens) + 48


def fits(client: ExecutorClient, text: Text, running: list[Text]) -> bool:
    """Whether the free blocks hold a text and one more block of each running one."""
    free = client.pressure  # of the last answer
    return not running or free is None or free.free_blocks > len(running) + len(text.tokens) // free.block_size


async def main(target: str, *prompts: str) -> None:
    """Write a text for each prompt, greedily."""
    async with ExecutorClient(target, session=True) as client:
        texts = [Text(client, prompt) for prompt in prompts]
        waiting, running, steps = deque(texts), list[Text](), 0
        while waiting or running:
            if waiting and fits(client, waiting[0], running):
                running.append(waiting.popleft())
            room, items, fed = BUDGET, [], []
            for text in running:  # one token of a text that decodes, or a chunk of a prompt
                if span := text.tokens[text.fed :][:room]:
                    last = text.fed + len(span) == len(text.tokens)  # only then is its row wanted
                    items.append(text.sequence.item(span, OutputSpec(Positions.LAST if last else Positions.NONE)))
                    fed.append((text, len(span), last))
                    room -= len(span)
            done, refused = (await client.forward(items)).split(fed)
            steps += 1
            for (text, count, last), answer in done:
                text.fed += count
                text.tokens += [answer.token] if last else []
            leaving = [text for text in running if len(text.tokens) >= text.end]
            if refused and not leaving:
                if len(running) == 1 or not all(isinstance(error, KvBlocksExhausted) for _, error in refused):
                    raise refused[0][1]
                leaving = running[-1:]  # the cache is full: preempt the text that came last
                waiting.extendleft(leaving)
            running = [text for text in running if text not in leaving]
            await client.release([text.sequence for text in leaving])
            for text in leaving:
                text.sequence, text.fed = client.sequence(), 0  # a preempted text is fed again from its first token
    for text in texts:
        print(repr(bytes(token for token in text.tokens if token < 256).decode(errors="replace")))
    print(f"{len(texts)} texts in {steps} steps")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
