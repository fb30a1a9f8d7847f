"""A server whose handler raises with the prompt in its locals, and one call to it. Started by `test_log`.

Arguments: the log's format, a file of tokens, the token to send, and the prompt's token ids.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc

from ferrum_rpc.logs import configure_logging
from ferrum_rpc.service import executor
from ferrum_rpc.service.guard.auth import Security
from tests.serving import serve_identity
from tests.wiring import item, pb


def raise_with(state: Any, account: Any, items: Any, **_: object) -> None:
    prompt = [int(token) for token in items[0].tokens]
    raise RuntimeError(f"a bug, {len(prompt)} tokens on")


async def main(log_format: str, tokens: str, token: str, *prompt: str) -> None:
    """The call must be answered with INTERNAL."""
    configure_logging(log_format)
    executor.ForwardCall = raise_with  # type: ignore[assignment, misc]
    async with serve_identity(vocab_size=100_000, security=Security(tokens=Path(tokens))) as served:
        request = pb.PrefillRequest(item=item([int(each) for each in prompt]))
        try:
            await served.executor.Prefill(request, metadata=(("authorization", f"Bearer {token}"),))
        except grpc.aio.AioRpcError as error:
            print(error.code().name)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
