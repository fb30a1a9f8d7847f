"""Connect, run the prompts, show what happened."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from clients.scheduler.display import display_for
from clients.scheduler.driver import NOT_NOW, Driver, ExecutorGone, Patience
from clients.scheduler.options import Options, parse
from clients.scheduler.policy import Budget
from clients.scheduler.report import Run, summarise
from clients.scheduler.request import Request
from clients.scheduler.speculation import Drafter, DraftModel, Lookup
from clients.scheduler.text import TokenizerError, tokenizer_for
from ferrum_rpc.client import CacheMode, ExecutorClient, ExecutorInfo
from ferrum_rpc.errors import ExecutorError, TransportError, Unauthenticated


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when every prompt was served, 1 when something failed, 130 when interrupted."""
    options = parse(arguments)
    try:
        run = asyncio.run(serve(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TokenizerError, ExecutorGone) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ExecutorError as error:
        print(f"error: {_explained(error, options.target)}", file=sys.stderr)
        return 1
    return 1 if run.failed else 0


async def serve(options: Options) -> Run:
    """Run the prompts of ``options`` and show them. Raises what the program cannot go on with."""
    async with AsyncExitStack() as clients:
        client = await clients.enter_async_context(_client(options, options.target))
        info = await _info(client, options)
        drafter: Drafter | None = Lookup() if options.speculate else None
        if options.draft is not None:
            small = await clients.enter_async_context(_client(options, options.draft))
            other = await _info(small, options)
            vocabulary = other.model.vocab_size
            if vocabulary != info.model.vocab_size:
                raise TokenizerError(
                    f"{options.draft} has a vocabulary of {vocabulary} tokens, {options.target} one of "
                    f"{info.model.vocab_size}: a draft is in the same tokens"
                )
            drafter = DraftModel(small, other)
        tokenizer = tokenizer_for(info.model.vocab_size, options.tokenizer)
        requests = [
            Request(index, tuple(tokenizer.encode(text)), options.max_new_tokens, text)
            for index, text in enumerate(options.prompts)
        ]
        budget = Budget(
            tokens=min(options.token_budget, info.limits.max_batch_tokens),
            items=info.limits.max_batch_items,
            running=min(
                options.max_running,
                info.limits.max_sequences,
                info.limits.max_sequences_per_caller or options.max_running,
            ),
        )
        display = display_for(requests, tokenizer, plain=options.plain)
        driver = Driver(
            client,
            info,
            budget=budget,
            sampling=options.sampling,
            stop_tokens=frozenset(info.model.eos_token_ids),
            observer=display,
            patience_s=options.patience_s,
            drafter=drafter,
            run_tokens=options.run_tokens,
            chains=options.session,
            cache_mode=CacheMode.BYPASS if options.bypass else CacheMode.DEFAULT,
        )
        before = await client.status()
        with display:
            run = await driver.run(requests)
        display.summary(summarise(run, before, await client.status()))
        return run


def _client(options: Options, target: str) -> ExecutorClient:
    return ExecutorClient(
        target,
        token=options.token,
        credentials=options.credentials,
        client_name="scheduler",
        session=options.session,
    )


async def _info(client: ExecutorClient, options: Options) -> ExecutorInfo:
    """What is served there; waits while it is still loading."""
    patience = Patience(options.patience_s)
    while True:
        try:
            return await client.info()
        except NOT_NOW as error:
            await patience.wait(error, error.retry_after_s)


def _explained(error: ExecutorError, target: str) -> str:
    """One line. Of gRPC's own long chains of reasons only the last is the reason."""
    if isinstance(error, TransportError) and error.metadata.get("grpc_code") == "UNAVAILABLE":
        return f"cannot reach an executor at {target}: {error.message.rpartition(': ')[2]}"
    how = "; name a file with a token, --token-file FILE" if isinstance(error, Unauthenticated) else ""
    return f"{target} answers {error.reason}: {error.message}{how}"
