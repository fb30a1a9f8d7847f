"""The log on a terminal: a screen when the executor serves, then a line or two for each event.

The start is one screen, so its events are held until `ready`; warnings during the start, and what stops it, are written
at once. Programs read JSON (`logs`), with every event as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from ferrum_rpc.terminal import aligned, hanging, program, wrap

HELD: Final = frozenset({"listening", "memory_planned", "loading", "serving", "backend_selected", "metrics_enabled"})
"""Events of the start that the screen shows."""

SEPARATE_CHOICES: Final = ("device", "dtype", "kv_blocks")
"""Choices with a separate line."""

BOLD, DIM, RED, YELLOW, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
COLOURS: Final = {"warning": YELLOW, "error": RED, "critical": RED}
DEFAULT_TARGET: Final = "127.0.0.1:50051"
UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
NUMBERS: Final = ("pid", "port", "rank")
"""Fields whose numbers are not counts."""

NOTHING: Final = ("", "nothing", "none")

Event = Mapping[str, Any]


class Console:
    """A processor of structlog that renders events. ``width``: columns of the terminal, read for each event; None: no
    wrapping."""

    def __init__(self, width: Callable[[], int | None], *, colours: bool) -> None:
        self._width = width
        self._colours = colours
        self._facts: dict[str, dict[str, Any]] = {}
        self._choices: dict[str, str] = {}
        self._serves = False

    def __call__(self, logger: object, method: str, event: Event) -> str:
        """The lines of an event. Raises `DropEvent` if the screen will show it."""
        name, level = event["event"], event["level"]
        if level == "info" and name in HELD and not self._serves:
            return self._hold(name, event)
        if name == "ready":
            self._serves = True
            return self._screen(event)
        if name == "startup_failed":
            return self._refusal(event)
        return self._lines(event)

    def _hold(self, name: str, event: Event) -> str:
        if name == "backend_selected":
            self._choices[event["choice"]] = event["reason"]
        else:
            self._facts[name] = dict(event)
        if name != "listening":
            raise structlog.DropEvent
        self._choices.clear()  # what was chosen so far is the process's, and not the model's
        return self._paint(DIM, f"listening on {event['target']}, loading the model ...")

    def _screen(self, event: Event) -> str:
        """The screen: what is served, where, how, and the next commands to type."""
        width = self._width()
        serving, plan, listening = (self._facts.get(name, {}) for name in ("serving", "memory_planned", "listening"))
        split = [(*choice.partition("=")[::2], reason) for choice, reason in self._choices.items()]
        own = {name: (value, reason) for name, value, reason in split if name in SEPARATE_CHOICES}
        device, dtype, cache = (own.get(name, ("", "")) for name in SEPARATE_CHOICES)
        guards = [
            name for name, is_on in (("TLS", listening.get("tls")), ("tokens", listening.get("credentials"))) if is_on
        ]
        rows = [
            ("address", f"{event['target']}, {' and '.join(guards) or 'without TLS and tokens'}"),
            ("model", f"{serving.get('model')}: {_model(serving)}"),
            ("device", f"{device[0]}: {serving.get('device')}, {serving.get('threads')} threads; {device[1]}"),
            ("dtype", "; ".join(filter(None, dtype))),
            *([("weights", _weights(plan))] if "weights_bytes" in plan else []),
            ("cache", f"{_cache(serving)}; {cache[1]}"),
            *([("metrics", self._facts["metrics_enabled"]["url"])] if "metrics_enabled" in self._facts else []),
        ]
        others = [(f"{name}={value}" if value else name, reason) for name, value, reason in split if name not in own]
        title = f"ferrum-rpc {serving.get('version', '')} serves {serving.get('model', '')}"
        lines = [self._paint(BOLD, title), ""]
        lines += [*aligned(rows, width, 2), "", *aligned(others, width, 2), ""]
        lines += aligned(_next(event["target"], listening), None, 2)  # to be copied
        return "\n".join([*lines, ""])

    def _refusal(self, event: Event) -> str:
        """The error alone, which says what is wrong and usually what to do."""
        return "\n".join(wrap(f"ferrum-rpc serve: {event['error']}", self._width()))

    def _lines(self, event: Event) -> str:
        """Time, level, the event's name and facts; below it, what to do."""
        given = dict(event)
        name, level, when = (str(given.pop(key, "")) for key in ("event", "level", "timestamp"))
        action, trace = str(given.pop("action", "")), given.pop("exception", "")
        if name == "backend_selected":
            name, given = given.pop("choice"), {"because": given["reason"]}
        begin = f"{when} " + ("" if level == "info" else f"{level}: ")
        facts = ", ".join(fact(key, value) for key, value in given.items())
        indent = len(when) + 1
        lines = wrap(f"{begin}{name}" + (f": {facts}" if facts else ""), self._width(), indent)
        if action.lower() not in NOTHING:
            lines += hanging(f"{' ' * indent}→ ", action, self._width())
        colour = COLOURS.get(level)
        if colour:
            lines[0] = lines[0].replace(f"{level}: ", f"{self._paint(colour, level)}: ", 1)
        lines[0] = lines[0].replace(name, self._paint(BOLD, name), 1)
        return "\n".join([*lines, *([trace] if trace else [])])

    def _paint(self, style: str, text: str) -> str:
        return f"{style}{text}{PLAIN}" if self._colours else text


def size(count: int) -> str:
    """A number of bytes, for people."""
    number, unit = float(count), 0
    while number >= 1000 and unit < len(UNITS):
        number, unit = number / 1024, unit + 1
    return f"{count} bytes" if not unit else f"{number:.3g} {UNITS[unit - 1]}"


def amount(count: int) -> str:
    """A large number, for people."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:,}"


def fact(key: str, value: object) -> str:
    """A field of an event in words: bytes and seconds in their units."""
    if isinstance(value, int) and not isinstance(value, bool) and (key.endswith("_bytes") or key == "bytes"):
        return f"{key.removesuffix('_bytes').replace('_', ' ')} {size(value)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (key.endswith("_s") or key == "seconds"):
        return f"{key.removesuffix('_s').replace('_', ' ')} {value:g} s".removeprefix("seconds ")
    counts = isinstance(value, int) and not isinstance(value, bool) and key not in NUMBERS
    shown = f"{value:,}" if counts else value
    return f"{key.replace('_', ' ')} {shown}"


def _model(serving: Event) -> str:
    parameters = serving.get("parameters", 0)
    what = [
        serving.get("architecture", ""),
        *([f"{amount(parameters)} parameters"] if parameters else []),
        f"vocabulary of {serving.get('vocab_size', 0):,}",
        f"context of {serving.get('max_context', 0):,} tokens",
    ]
    return ", ".join(what)


def _weights(plan: Event) -> str:
    ranks = f", of the first of {plan['ranks_here']} ranks" if "ranks_here" in plan else ""
    return f"{size(plan['weights_bytes'])}{ranks}"


def _cache(serving: Event) -> str:
    return f"{size(serving['kv_bytes'])} in {serving['kv_dtype']}, {serving['kv_tokens']:,} tokens"


def _next(target: str, listening: Event) -> list[tuple[str, str]]:
    """Commands to type next, for a server that listens so."""
    flags = "" if target == DEFAULT_TARGET else f" --target {target}"
    flags += " --tls-ca FILE" if listening.get("tls") else ""
    flags += " --token-file FILE" if listening.get("credentials") else ""
    return [
        ("try it", f'{program()} generate "In the beginning"{flags}'),
        ("watch it", f"{program()} top{flags}"),
        ("stop it", "Ctrl-C: it drains, then ends"),
    ]
