"""EBNF of llama.cpp and xgrammar as Lark, for grammars that mean the same in both.

In EBNF a grammar derives characters. In llguidance's Lark it derives lexemes, and the lexer takes the longest one: a
literal that begins another one would hide it. So every terminal becomes one of a single character, of which none begins
another. What has no such form is refused with its name: look-ahead, special tokens, rules without a definition.
"""

from __future__ import annotations

import json
import re
from typing import Final

from ferrum_rpc.client import InvalidRequest

RULE: Final = "::="
ROOT: Final = "root"

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\n]*)+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)(?P<defines>\s*::=)?
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_PLAIN: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\", '"': '"', "'": "'", "[": "[", "]": "]"} | {
    each: each for each in "-^/"
}
_QUANTIFIERS: Final = ("*", "+", "?", "{")


def is_ebnf(text: str) -> bool:
    """Whether a grammar is written as EBNF: it has a rule ``name ::= ...``."""
    return RULE in text


def lark_of(text: str) -> str:
    """The Lark of a grammar in EBNF, whose start is the rule ``root``. Raises `InvalidRequest`."""
    return _Rewriter(text).lark()


def _invalid(what: str) -> InvalidRequest:
    return InvalidRequest(f"grammar: {what}", field="grammar")


class _Rewriter:
    """Rewrites one grammar. ``_rules``: the rule's name in Lark by its own, in the order of their first mention."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._rules: dict[str, str] = {}
        self._bodies: dict[str, str] = {}

    def lark(self) -> str:
        while self._at < len(self._tokens):
            kind, name = self._take()
            if kind != "rule":
                raise _invalid(f"a rule must begin with `name {RULE}`, not with {name!r}")
            if name in self._bodies:
                raise _invalid(f"the rule {name!r} is defined twice")
            self._bodies[name] = self._alternatives()
        if ROOT not in self._bodies:
            raise _invalid(f"it has no rule {ROOT!r}")
        missing = [each for each in self._rules if each not in self._bodies]
        if missing:
            raise _invalid(f"the rule {missing[0]!r} is not defined")
        lines = [f"start: {self._rule(ROOT)}"]
        return "\n".join([*lines, *(f"{self._rule(name)}: {body}" for name, body in self._bodies.items())])

    def _take(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _rule(self, name: str) -> str:
        return self._rules.setdefault(name, f"r{len(self._rules)}")

    def _alternatives(self) -> str:
        found = [self._concatenation()]
        while self._next() == ("mark", "|"):
            self._take()
            found.append(self._concatenation())
        return " | ".join(found)

    def _concatenation(self) -> str:
        found: list[str] = []
        while True:
            kind, text = self._next()
            if kind in ("rule", "end") or (kind == "mark" and text in "|)"):
                return " ".join(found) or '""'
            found.append(self._repeated())

    def _repeated(self) -> str:
        body = self._item()
        while (each := self._next())[0] in ("mark", "times") and each[1][0] in _QUANTIFIERS:
            self._take()
            body = f"({body}){''.join(each[1].split())}"
        return body

    def _item(self) -> str:
        kind, text = self._take()
        if kind == "name":
            return self._rule(text)
        if kind == "text":
            return " ".join(json.dumps(each, ensure_ascii=False) for each in _characters(text[1:-1])) or '""'
        if kind == "set":
            return _set(text)
        if text == ".":
            return r"/(.|\n)/"
        if text == "(":
            body = self._alternatives()
            if self._next() != ("mark", ")"):
                raise _invalid("a parenthesis is not closed")
            self._take()
            return f"({body})"
        raise _invalid(f"{text!r} has nothing to repeat")


def _tokens(text: str) -> list[tuple[str, str]]:
    """The tokens as (kind, text); a name that is being defined has the kind ``rule``."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise _invalid(f"line {line} has {text[at : at + 12]!r}, which has no equivalent in Lark")
        at = match.end()
        if match["name"] is not None:
            found.append(("name" if match["defines"] is None else "rule", match["name"]))
        elif match.lastgroup != "space":
            found.append((str(match.lastgroup), match[0]))
    return found


def _characters(text: str) -> list[str]:
    """The characters of a literal or a set, without escapes."""
    found: list[str] = []
    at = 0
    while at < len(text):
        match = _ESCAPE.match(text, at)
        if match is None:
            found.append(text[at])
            at += 1
            continue
        found.append(_escaped(match[1]))
        at = match.end()
    return found


def _escaped(escape: str) -> str:
    if len(escape) > 1:
        number = int(escape[1:], 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise _invalid(f"\\{escape} is not a character")
        return chr(number)
    if escape not in _PLAIN:
        raise _invalid(f"the escape \\{escape} has no equivalent in Lark")
    return _PLAIN[escape]


def _set(text: str) -> str:
    """A set of characters as a regular expression of one character."""
    inside = text[1:-1]
    negated = inside.startswith("^")
    spans: list[tuple[str, str]] = []
    parts = _set_parts(inside[negated:])
    at = 0
    while at < len(parts):
        character, _ = parts[at]
        if at + 2 < len(parts) and parts[at + 1] == ("-", False):
            last, _ = parts[at + 2]
            if last < character:
                raise _invalid(f"the range {character}-{last} of {text} is empty")
            spans.append((character, last))
            at += 3
        else:
            spans.append((character, character))
            at += 1
    if not spans:
        raise _invalid(f"the set {text} has no characters")
    body = "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in spans)
    return f"/[{'^' if negated else ''}{body}]/"


def _set_parts(inside: str) -> list[tuple[str, bool]]:
    """The characters of a set, each with whether it was escaped."""
    found: list[tuple[str, bool]] = []
    at = 0
    while at < len(inside):
        match = _ESCAPE.match(inside, at)
        found.append((inside[at], False) if match is None else (_escaped(match[1]), True))
        at = at + 1 if match is None else match.end()
    return found


def _code(character: str) -> str:
    return f"\\u{{{ord(character):x}}}"
