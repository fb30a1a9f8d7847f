"""Best of n: the prompt is computed once, n forks of it are sampled in the same steps, and the likeliest text wins."""

import asyncio
import sys

from ferrum_rpc.client import ExecutorClient, OutputSpec, Positions, Sample, Sequence


async def write(child: Sequence, last: int, seed: int) -> tuple[float, str]:
    """A text with its mean log-probability, by which it is compared with the others."""
    output = Sample(temperature=0.9, seed=seed, logprob=True)
    tokens = [each async for each in child.stream([last], max_tokens=48, output=output)]
    score = sum(each.logprob or 0.0 for each in tokens) / len(tokens)
    return score, bytes(each.token for each in tokens if each.token < 256).decode(errors="replace")


async def main(target: str, text: str, count: str) -> None:
    """Print all texts, the best one first."""
    prompt = list(text.encode())
    async with ExecutorClient(target, session=True) as client, client.sequence() as parent:
        await parent.prefill(prompt[:-1], OutputSpec(Positions.NONE))  # the last token is fed to each child
        children = await parent.fork(int(count))  # they share the blocks of the prompt
        texts = await asyncio.gather(*(write(child, prompt[-1], seed) for seed, child in enumerate(children)))
        await client.release(children)
    for score, written in sorted(texts, reverse=True):
        print(f"{score:7.3f}  {text}{written!r}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
