"""Connect, run the prompts, show what happened."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from clients.scheduler.disaggregated import Disaggregated
from clients.scheduler.display import Display, display_for
from clients.scheduler.driver import NOT_NOW, Driver, ExecutorGone, Patience
from clients.scheduler.options import Options, parse
from clients.scheduler.policy import Budget
from clients.scheduler.report import Run, summarise
from clients.scheduler.request import Request
from clients.scheduler.speculation import Drafter, DraftModel, Lookup
from clients.scheduler.text import TokenizerError, tokenizer_for
from ferrum_rpc.client import CacheMode, ExecutorClient, ExecutorInfo
from ferrum_rpc.errors import ExecutorError, LayoutMismatch, TransportError, Unauthenticated


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
        client, info = await _connect(clients, options, options.target)
        drafter: Drafter | None = Lookup() if options.speculate else None
        if options.draft is not None:
            small, other = await _connect(clients, options, options.draft)
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
        display = display_for(requests, tokenizer, plain=options.plain)
        driver = _driver(options, client, info, display, drafter)
        runner: Driver | Disaggregated = driver
        if options.prefill_target is not None:
            first, other = await _connect(clients, options, options.prefill_target)
            _check_same_cache(options, other, info)
            runner = Disaggregated(_driver(replace(options, run_tokens=0), first, other, display), driver)
        before = await client.status()
        with display:
            run = await runner.run(requests)
        display.summary(summarise(run, before, await client.status()))
        return run


def _driver(
    options: Options, client: ExecutorClient, info: ExecutorInfo, display: Display, drafter: Drafter | None = None
) -> Driver:
    budget = Budget(
        tokens=min(options.token_budget, info.limits.max_batch_tokens),
        items=info.limits.max_batch_items,
        running=min(
            options.max_running,
            info.limits.max_sequences,
            info.limits.max_sequences_per_caller or options.max_running,
        ),
    )
    return Driver(
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


def _check_same_cache(options: Options, prefill: ExecutorInfo, decode: ExecutorInfo) -> None:
    """Raise `LayoutMismatch` before anything is computed that could not move."""
    here, there = prefill.model, decode.model
    if (here.fingerprint, here.kv_dtype) != (there.fingerprint, there.kv_dtype):
        raise LayoutMismatch(
            f"{options.prefill_target} serves {here.name} with a cache of {here.kv_dtype}, {options.target} "
            f"{there.name} with {there.kv_dtype}: sequences cannot move between different models or caches"
        )


async def _connect(clients: AsyncExitStack, options: Options, target: str) -> tuple[ExecutorClient, ExecutorInfo]:
    """A client of ``target``, and what is served there; waits while it is still loading."""
    client = ExecutorClient(
        target,
        token=options.token,
        credentials=options.credentials,
        client_name="scheduler",
        session=options.session,
    )
    await clients.enter_async_context(client)
    patience = Patience(options.patience_s)
    while True:
        try:
            return client, await client.info()
        except NOT_NOW as error:
            await patience.wait(error)
        except ExecutorError as error:
            raise ExecutorGone(_explained(error, target)) from None


def _explained(error: ExecutorError, target: str) -> str:
    """One line. Of gRPC's own long chains of reasons only the last is the reason."""
    if isinstance(error, TransportError) and error.metadata.get("grpc_code") == "UNAVAILABLE":
        return f"cannot reach an executor at {target}: {error.message.rpartition(': ')[2]}"
    how = "; name a file with a token, --token-file FILE" if isinstance(error, Unauthenticated) else ""
    return f"{target} answers {error.reason}: {error.message}{how}"
