"""Connect, run the prompts, show what happened."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from clients.scheduler.display import Display, display_for
from clients.scheduler.options import Options, parse
from clients.scheduler.report import summarise
from clients.scheduler.text import Tokenizer, TokenizerError, tokenizer_for
from ferrum_rpc.client import (
    TRY_LATER,
    CacheMode,
    ExecutorClient,
    ExecutorError,
    ExecutorStatus,
    LayoutMismatch,
    Sample,
    Unauthenticated,
    explained,
)
from ferrum_rpc.client.fleet import Member, Members, certificate_host
from ferrum_rpc.scheduler import (
    STEPS_IN_FLIGHT,
    Drafter,
    DraftModel,
    Driver,
    ExecutorGone,
    Lookup,
    Request,
    Router,
    RunCounts,
    budget_of,
)

OTHERS_S: Final = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when every prompt was served, 1 when something failed, 130 when interrupted."""
    options = parse(arguments)
    # The display shows who comes and goes: without a handler these warnings would be written over it.
    logging.getLogger("ferrum_rpc.client.fleet").addHandler(logging.NullHandler())
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
        print(f"error: {_explained(error, ', '.join(options.targets))}", file=sys.stderr)
        return 1
    return 1 if run.failed else 0


async def serve(options: Options) -> RunCounts:
    """Run the prompts of ``options`` and show them. Raises `ExecutorGone`, `TokenizerError` and `ExecutorError`."""
    async with AsyncExitStack() as stack:
        fleets = [
            await stack.enter_async_context(Members(targets, connect=partial(_client, options, targets)))
            for targets in (options.targets, options.prefill_targets)
            if targets
        ]
        [decode, *prefill] = fleets
        members = [await _first(each, options) for each in fleets]
        _check_same_cache(*members)
        info = members[0].info
        drafter = await _drafter(stack, options, members[0])
        tokenizer = tokenizer_for(info.model.vocab_size, options.tokenizer)
        requests = [
            _request(options, index, text, tokenizer, info.model.eos_token_ids)
            for index, text in enumerate(options.prompts)
        ]
        display = display_for(requests, tokenizer, plain=options.plain)
        make = partial(_driver, options, display, drafter)
        router = Router(make, decode, *prefill, watcher=display, patience_s=options.patience_s)
        before = await _status(decode)
        with display:
            run = await router.run(requests)
        display.summary(summarise(run, before, await _status(decode)))
        if options.texts is not None:
            options.texts.write_text("".join(f"{json.dumps(_text(each, tokenizer))}\n" for each in requests))
        return run


def _request(options: Options, index: int, text: str, tokenizer: Tokenizer, stops: Sequence[int]) -> Request:
    """The request of a prompt. Its seed is derived from its index, so that its text depends on no other prompt."""
    output = options.sampling
    if isinstance(output, Sample) and output.seed is not None:
        output = replace(output, seed=(output.seed << 32 | index) % 2**64)
    return Request(
        index,
        tuple(tokenizer.encode(text)),
        options.max_new_tokens,
        text,
        output=output,
        stops=tuple(stops),
        cache_mode=CacheMode.BYPASS if options.bypass else CacheMode.DEFAULT,
    )


def _text(request: Request, tokenizer: Tokenizer) -> dict[str, object]:
    """A request as JSON, for another program."""
    return {
        "prompt": request.text,
        "text": tokenizer.decode(request.generated),
        "token_ids": request.generated,
        "ending": request.ending and request.ending.value,
        "error": request.error,
        "rebuilds": request.rebuilds,
    }


async def _first(members: Members, options: Options) -> Member:
    """An executor that accepts sequences, once the others have answered too or `OTHERS_S` have passed, so that prompts
    are spread over all. Waits while models load."""
    try:
        async with asyncio.timeout(options.patience_s):
            while not (serving := members.serving):
                for target, error in members.troubles.items():
                    if members.named <= members.troubles.keys() and not isinstance(error, TRY_LATER):
                        raise ExecutorGone(_explained(error, target))
                await members.changed(members.changes)
    except TimeoutError:
        why = "; ".join(_explained(error, target) for target, error in members.troubles.items())
        raise ExecutorGone(why or f"no executor at {', '.join(members.targets)} takes sequences") from None
    await members.all_known(OTHERS_S)
    return serving[0]


async def _status(members: Members) -> ExecutorStatus | None:
    """The status of the only executor; None if there are several, or it is gone."""
    with suppress(ExecutorError):
        if len(members.named) == len(members.there) == 1:
            return await members.there[0].client.status()
    return None


def _driver(options: Options, display: Display, drafter: Drafter | None, member: Member, prompts: bool) -> Driver:
    """The driver of an executor; ``prompts``: that computes prompts only."""
    return Driver(
        member.client,
        member,
        budget=budget_of(member, options.token_budget, options.max_running),
        observer=display,
        patience_s=options.patience_s,
        drafter=None if prompts else drafter,
        run_tokens=0 if prompts else options.run_tokens,
        chains=options.session,
        tokens_ahead=options.session,
    )


async def _drafter(clients: AsyncExitStack, options: Options, member: Member) -> Drafter | None:
    """The source of drafts, if wanted. Waits while the smaller model loads."""
    if (target := options.draft) is None:
        return Lookup() if options.speculate else None
    client = await clients.enter_async_context(_client(options, (target,), target))
    try:
        info = await client.info(timeout_s=options.patience_s)
    except ExecutorError as error:
        raise ExecutorGone(_explained(error, target)) from None
    if (found := info.model.vocab_size) != (wanted := member.info.model.vocab_size):
        raise TokenizerError(
            f"{target} has a vocabulary of {found} tokens, {member.target} one of {wanted}: "
            "a draft is in the same tokens"
        )
    return DraftModel(client, info)


def _check_same_cache(decode: Member, prefill: Member | None = None) -> None:
    """Raise `LayoutMismatch` before anything is computed that cannot be moved."""
    if prefill is None:
        return
    if prefill.model != decode.model:
        here, there = prefill.info.model, decode.info.model
        raise LayoutMismatch(
            f"{prefill.target} serves {here.name} with a cache of {here.kv_dtype}, {decode.target} {there.name} with "
            f"{there.kv_dtype}: sequences cannot move between different models or caches"
        )


def _client(options: Options, targets: Sequence[str], target: str) -> ExecutorClient:
    """A client of one of the ``targets``, or of an address that one resolves to, whose certificate has the name of the
    target."""
    host = certificate_host(targets, target) if options.credentials is not None else ""
    return ExecutorClient(
        target,
        token=options.token,
        credentials=options.credentials,
        channel_options=[("grpc.ssl_target_name_override", host)] if host else (),
        client_name="scheduler",
        session=options.session,
        steps_in_flight=STEPS_IN_FLIGHT,
        tokens_ahead=options.session,
    )


def _explained(error: ExecutorError, target: str) -> str:
    """An error in one line."""
    if (words := explained(error, target)) != error.message:  # it cannot be reached
        return words
    how = "; name a file with a token, --token-file FILE" if isinstance(error, Unauthenticated) else ""
    return f"{target} answers {error.reason}: {error.message}{how}"
