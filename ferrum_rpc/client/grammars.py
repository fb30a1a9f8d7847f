"""The client's grammars: registered once, and again after the executor evicted them.

As with token masks, an item whose grammar is unknown at the executor, after a restart or an eviction, is sent again
automatically once the grammar is registered again. Their ids are known in advance, so a grammar is registered by the
call that returns its id, and at the other executors of a fleet when an item first needs it there.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.info import Capability
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.core import Grammar, GrammarKind, OutputSpec
from ferrum_rpc.core.check import check_limit
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.wire.masks import grammar_to_proto

KNOWN_BYTES: Final = 16 << 20
"""Bytes of texts that a client keeps; the oldest are dropped first."""


class KnownGrammars:
    """Grammars by their id. The clients of a fleet share one, so that each can register all of them again."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, Grammar] = OrderedDict()
        self._bytes = 0

    def get(self, grammar_id: bytes) -> Grammar | None:
        """The grammar, if it is known."""
        return self._grammars.get(grammar_id)

    def keep(self, grammar_id: bytes, grammar: Grammar) -> None:
        """Keep a grammar that is now registered."""
        if grammar_id not in self._grammars:
            self._bytes += len(grammar.text)
        self._grammars[grammar_id] = grammar
        self._grammars.move_to_end(grammar_id)
        while self._bytes > KNOWN_BYTES:
            self._bytes -= len(self._grammars.popitem(last=False)[1].text)


class Grammars:
    """The grammars of one client, a subset of those ``known``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.known = KnownGrammars()

    async def register(self, kind: GrammarKind, text: str | Mapping[str, Any], deadline: Deadline) -> bytes:
        """Register a grammar, unless this client has before; its id."""
        grammar = as_grammar(kind, text)
        info = await self._context.info(deadline)
        if Capability.GRAMMAR not in info.capabilities:
            raise NotSupported("the executor offers no grammars (capability GRAMMAR)", field="grammar")
        check_limit(info.limits, "max_grammar_bytes", len(grammar.text), "bytes of a grammar", "text")
        grammar_id = grammar.id(info.model.tokenizer_sha256)
        if self.known.get(grammar_id) is None:
            await self._register(grammar, deadline)
        self.known.keep(grammar_id, grammar)
        return grammar_id

    async def register_again(self, outputs: Iterable[OutputSpec], deadline: Deadline) -> bool:
        """Register the grammars of outputs that this client has kept. False: it has none of them."""
        named = {kind.grammar for output in outputs if (kind := output.constrained) is not None}
        known = [grammar for each in named if (grammar := self.known.get(each)) is not None]
        await asyncio.gather(*(self._register(grammar, deadline) for grammar in known))
        return bool(known)

    async def _register(self, grammar: Grammar, deadline: Deadline) -> None:
        await self._context.call(self._context.executor.RegisterGrammar, grammar_to_proto(grammar), deadline)


def as_grammar(kind: GrammarKind, text: str | Mapping[str, Any]) -> Grammar:
    """A grammar as it is sent. Raises `InvalidRequest`."""
    if not isinstance(kind, GrammarKind):
        raise InvalidRequest(f"kind must be one of GrammarKind, not {kind!r}", field="kind")
    if isinstance(text, Mapping) and kind is GrammarKind.JSON_SCHEMA:
        try:
            text = json.dumps(text)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the schema is not JSON: {error}", field="text") from None
    if not isinstance(text, str):
        raise InvalidRequest(
            f"the text of a grammar must be a str, or for a JSON schema a mapping, not {type(text).__name__}",
            field="text",
        )
    try:
        return Grammar(kind, text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text of a grammar must be UTF-8: {error.reason}", field="text") from None
