"""Registered grammars, by the hash of their kind, the tokenizer and their text.

The engine has a process for each. A caller's grammars are its own there, also if another caller has registered the same
text: what one does with a grammar delays no other.
"""

from __future__ import annotations

import asyncio
from typing import Final

from ferrum_rpc.core import Grammar, Limits
from ferrum_rpc.engine.api import Operation
from ferrum_rpc.engine.commands import Command, Operations
from ferrum_rpc.errors import ExecutorError, GrammarUnknown
from ferrum_rpc.service.asking import Submit, between_steps
from ferrum_rpc.service.contents import ContentTable, Registered
from ferrum_rpc.service.guard.slots import Slots
from ferrum_rpc.service.records import Account, Resource

COMPILED_AT_ONCE: Final = 2
"""Grammars that are compiled at a time, one of each caller: it takes the processors from steps."""

LOOK_S: Final = (0.002, 0.005, 0.01, 0.02)
"""Seconds between two questions whether a grammar is compiled; the last one repeats."""


class GrammarTable(ContentTable):
    """The grammars of all callers."""

    resource = Resource.GRAMMARS
    what = "grammars"
    limit = "max_grammars"
    change = Operations.change_grammars

    def __init__(self, limits: Limits, submit: Submit) -> None:
        super().__init__(limits, submit)
        self._compiling = Slots(COMPILED_AT_ONCE)

    @staticmethod
    def key(account: Account, content_id: bytes) -> bytes:
        return account.digest + content_id

    async def register(self, account: Account, grammar_id: bytes, grammar: Grammar) -> None:
        """Register a grammar, and wait until it is compiled. Raises `QueueFull` if there is no room, and what
        `Operations.grammar_compiled` raises; the grammar is not registered then."""
        async with self._compiling.held(((account.caller.name, 1),)):
            await self._register(account, grammar_id, grammar)

    async def _register(self, account: Account, grammar_id: bytes, grammar: Grammar) -> None:
        made = self._add(account, grammar_id, grammar)
        self._use(made)
        try:
            await _compiled(self._submit, self.key(account, grammar_id))
        except BaseException as error:
            if isinstance(error, ExecutorError) and self.known(account, grammar_id) is made:
                dropped = self._forget(made)
                self._submit(Operation(Command(Operations.change_grammars, (), dropped), lambda result: None))
            raise
        finally:
            self._unuse(made)

    def pin(self, account: Account, grammar_id: bytes) -> Registered:
        """Pin the grammar that an item names. `unpin` must follow. Raises `GrammarUnknown`."""
        found = self.known(account, grammar_id)
        if found is None:
            raise GrammarUnknown(
                "you have registered no such grammar, or others have taken its place: register it again",
                metadata={"grammar_id": grammar_id.hex()},
                field="output.grammar_id",
            )
        self._use(found)
        return found


async def _compiled(submit: Submit, key: bytes) -> None:
    """Wait until a grammar is compiled. Raises the reason why it cannot be."""
    waits = iter(LOOK_S)
    while True:
        if await between_steps(submit, Command(Operations.grammar_compiled, key)):
            return
        await asyncio.sleep(next(waits, LOOK_S[-1]))  # between steps: the engine has no event loop to wake this one
