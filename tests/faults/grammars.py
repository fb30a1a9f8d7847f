"""R35: a grammar is a function of tokens, and one that is hostile delays nobody else.

The same texts are made by grammars of the executor and by masks that the caller makes of them, over everything that may
happen to a sequence between two tokens. Then one tenant registers and uses grammars that need all time and memory, and
another goes on as before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Final

from ferrum_rpc.client import (
    Answer,
    ExecutorClient,
    ExecutorError,
    GrammarKind,
    Greedy,
    Run,
    Sample,
    Sequence,
    TransportError,
)
from ferrum_rpc.errors import Reason
from tests.faults.figures import Figures, at_least, at_most, exactly, milliseconds, quantile
from tests.faults.sizes import Size
from tests.support.grammars import (
    AMBIGUOUS,
    END,
    IMPOSSIBLE,
    SOURCES,
    TOO_COMPLEX,
    allowed,
    compiled,
    encode,
    text_by_masks,
)
from tests.support.process import serving
from tests.support.tokens import token_file

PROMPT: Final = encode("The register of ")
SLOWER: Final = 3.0
PAUSE_S: Final = 0.01
"""Between a neighbour's steps: where tests share two cores, grammars are compiled with what it leaves."""
AT_ONCE: Final = 8
MOVES: Final = 2
"""At a time: an export and an import each, of four transfers that an executor allows."""
NEIGHBOUR, ATTACKER = "secret-neighbour", "secret-hostile"
FLAGS: Final = ("--dtype", "float32", "--max-grammar-bytes", "2MiB", "--max-request-bytes", "4MiB")

ACCEPTED: Final[dict[str, tuple[GrammarKind, str]]] = {
    "ambiguous": (GrammarKind.LARK, AMBIGUOUS),
    "exponential": (GrammarKind.REGEX, "(a{1,1000}){1,1000}"),
    "large": (GrammarKind.JSON_SCHEMA, '{"type":"string","minLength":100000,"maxLength":1000000}'),
}
"""Hostile ones that compile."""

TYPED: Final = {Reason.GRAMMAR_TOO_COMPLEX, Reason.INVALID_REQUEST, Reason.QUEUE_FULL, Reason.GRAMMAR_UNKNOWN}


async def r35_a_grammar_is_a_function_of_tokens(size: Size) -> Figures:
    """Masks by grammars and by the caller, and a hostile tenant beside another one."""
    hostile = dict([*list(TOO_COMPLEX.items())[: size.hostile_kinds], *list(IMPOSSIBLE.items())[: size.hostile_kinds]])
    hostile |= ACCEPTED
    different, tokens, done = await _compared(size.grammar_texts)
    alone, beside, outcomes, untyped, up = await _beside_hostile(size, hostile)
    floor = size.p99_floor_s
    return Figures(
        "A grammar is a function of tokens",
        exactly("tokens that differ from those of the caller's masks", different, 0),
        at_least("texts that ended by their grammar", done, size.grammar_texts),
        exactly("hostile grammars without a typed answer", untyped, 0),
        at_least("hostile grammars and uses that were refused or ended", sum(outcomes.values()), len(hostile)),
        exactly("executors that served on", up, 1),
        at_most(
            "a neighbour's p99 beside them, in its p99 alone",
            max(quantile(beside, 0.99), floor) / max(quantile(alone, 0.99), floor),
            SLOWER,
            "x",
        ),
        facts={
            "texts": size.grammar_texts,
            "tokens": tokens,
            "outcomes": dict(sorted(outcomes.items())),
            "p99 alone, ms": milliseconds(alone, 0.99),
            "p99 beside, ms": milliseconds(beside, 0.99),
        },
    )


# --- the same texts ---------------------------------------------------------------------------------------------------


async def _compared(texts: int) -> tuple[int, int, int]:
    """So many texts by grammars, with what happens between their tokens. Returns the tokens that differ from those of
    the caller's masks, all tokens, and the texts that were completed."""
    async with (
        serving(*FLAGS, model="demo", kv_blocks=2048) as first,
        serving(*FLAGS, model="demo", kv_blocks=2048) as second,
        ExecutorClient(first.target, session=True) as client,
        ExecutorClient(second.target) as other,
    ):
        grammars = {kind: await client.register_grammar(kind, text) for kind, text in SOURCES.items()}
        for kind, text in SOURCES.items():
            await other.register_grammar(kind, text)
        slots, moves = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(MOVES)
        found = list[tuple[list[int], list[int]]]()

        async def one(number: int) -> None:
            kind = list(SOURCES)[number % len(SOURCES)]
            temperature = (0.0, 1.1)[number // len(SOURCES) % 2]
            async with slots:
                own = await text_by_masks(client, PROMPT, compiled(kind, SOURCES[kind]), temperature, number)
                output = Sample(temperature, seed=number, grammar=grammars[kind], grammar_from=len(PROMPT))
                found.append((own, await _by_grammar(client, other, output, len(own), moves, random.Random(number))))

        await asyncio.gather(*map(one, range(texts)))
    different = sum(
        sum(a != b for a, b in zip(own, text, strict=False)) + abs(len(own) - len(text)) for own, text in found
    )
    return different, sum(len(own) for own, _ in found), sum(own[-1] == END for own, _ in found)


async def _by_grammar(  # noqa: PLR0917
    client: ExecutorClient,
    other: ExecutorClient,
    output: Sample,
    most: int,
    moves: asyncio.Semaphore,
    fate: random.Random,
) -> list[int]:
    """The same text by a grammar: between its tokens the sequence is cut, forked, rebuilt, moved to the other executor
    and back, or its call is made again."""
    text, sequence = list[int](), client.sequence(keep_tokens=True)
    there = False
    try:
        while (not text or text[-1] != END) and len(text) <= most:
            fed = text[-1:] or PROMPT
            event = fate.choice(["step", "run", "cut", "fork", "rebuild", "move", "again"]) if text else "step"
            match event:
                case "run":
                    text += (await sequence.decode(fed[0], output, run=Run(fate.randint(1, 8)))).tokens.tolist()
                    continue
                case "cut":
                    back = fate.randrange(len(text))
                    await sequence.truncate(len(PROMPT) + back)
                    await sequence.prefill(text[back:], output)
                    await sequence.truncate(sequence.length - 1)
                case "fork":
                    [child] = await sequence.fork()
                    await sequence.release()
                    sequence = child
                case "rebuild":
                    await sequence.rebuild()
                case "move":
                    target: Sequence = (client if there else other).sequence(keep_tokens=True)
                    async with moves:
                        await sequence.move_to(target)
                    sequence, there = target, not there
                case "again":
                    await sequence.decode(fed[0], output)
                    await sequence.truncate(sequence.length - 1)
            text.append((await sequence.prefill(fed, output)).token)
    finally:
        await sequence.release()
    return text


# --- beside hostile ones ----------------------------------------------------------------------------------------------


async def _beside_hostile(
    size: Size, grammars: dict[str, tuple[GrammarKind, str]]
) -> tuple[list[float], list[float], Counter[str], int, int]:
    """Seconds of a neighbour's steps alone and beside a hostile tenant; what that tenant was answered, by reason; its
    calls without a typed answer; and whether the executor serves at the end."""
    outcomes, untyped = Counter[str](), 0
    with token_file(f"neighbour {NEIGHBOUR}", f"hostile {ATTACKER}") as tokens:
        async with (
            serving("--tokens", str(tokens), *FLAGS, model="demo", kv_blocks=2048) as server,
            ExecutorClient(server.target, token=NEIGHBOUR, session=True) as neighbour,
            ExecutorClient(server.target, token=ATTACKER, session=True) as hostile,
        ):
            grammar = await neighbour.register_grammar(GrammarKind.JSON_SCHEMA, SOURCES[GrammarKind.JSON_SCHEMA])
            output = Greedy(grammar=grammar, grammar_from=len(PROMPT))
            alone = await _steps(neighbour, output, size.neighbour_calls, asyncio.Event())

            async def attack(name: str) -> None:
                nonlocal untyped
                try:
                    bad = await hostile.register_grammar(*grammars[name])
                    outcomes["registered"] += 1
                    async with hostile.sequence() as sequence:
                        text = encode("a") * 300 if name in {"ambiguous", "exponential"} else []
                        choice = Sample(5.0, seed=1, grammar=bad, grammar_from=len(PROMPT))
                        token = (await sequence.prefill([*PROMPT, *text], choice)).token
                        for _ in range(4):
                            answer = await sequence.decode(token, choice, run=Run(32))
                            outcomes[str(answer.run_end)] += 1
                            if answer.run_cause is not None:
                                raise answer.run_cause
                            token = answer.token if answer.tokens.size == 1 else int(answer.tokens[-1])
                            if token == END:
                                break
                except TransportError:
                    untyped += 1
                except ExecutorError as error:
                    outcomes[error.reason] += 1
                    untyped += error.reason not in TYPED

            over = asyncio.Event()

            async def attacks() -> None:
                for _ in range(size.hostile_grammars):
                    await asyncio.gather(*map(attack, grammars))
                over.set()

            attacking = asyncio.create_task(attacks())
            beside = await _steps(neighbour, output, size.neighbour_calls, over)
            await attacking
            async with neighbour.sequence() as sequence:
                text = [token async for token in sequence.generate(PROMPT, output=output)]
            up = int(
                server.status is None
                and allowed(compiled(GrammarKind.JSON_SCHEMA, SOURCES[GrammarKind.JSON_SCHEMA]), text) == {END}
            )
    return alone, beside, outcomes, untyped, up


async def _steps(client: ExecutorClient, output: Greedy, least: int, over: asyncio.Event) -> list[float]:
    """Seconds of single steps by a grammar: so many at least, and until it is ``over`` if that has a set time."""
    seconds: list[float] = []
    async with client.sequence() as sequence:
        token = (await sequence.prefill(PROMPT, output)).token
        while len(seconds) < least or not (over.is_set() or least == len(seconds)):
            began = time.monotonic()
            answer: Answer = await sequence.decode(token, output)
            seconds.append(time.monotonic() - began)
            token = answer.token
            await asyncio.sleep(PAUSE_S)
            if token == END:
                await sequence.truncate(len(PROMPT) - 1)
                token = (await sequence.prefill(PROMPT[-1:], output)).token
    return seconds
