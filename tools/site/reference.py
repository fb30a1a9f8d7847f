"""Pages of the reference, generated from the sources: settings, commands, metrics, log events, errors, limits.

Names, types and defaults come from the code. Explanations are the rows of the tables in `docs/`, which tests compare
with the code; a page links the sections in which a name occurs, so that nothing is explained twice.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Final

from tools.site.links import relinked
from tools.site.sources import anchor, logged_events, metric_families, page, rows, sections

EXPLAINED_IN: Final = ("contract.md", "operations.md", "fleet.md", "openai.md", "client.md", "quickstart.md")
"""Pages whose sections a reference links, in this order."""
MOST_LINKS: Final = 4
GENERATED: Final = "*Generated from the sources.*"


def pages() -> dict[str, str]:
    """The text of each page by its path on the site."""
    made = (settings, commands, metrics, log_events, errors, limits)
    return {f"reference/{each.__name__.replace('_', '-')}.md": "\n".join(each()) + "\n" for each in made}


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _copied(cell: str, source: str, target: str) -> str:
    """A cell of a table in `docs/`, with links that are right on another page."""
    return relinked(cell, f"docs/{source}", f"reference/{target}").replace("\\|", "|")


def _mentions(*spellings: str, but: str = "") -> list[str]:
    """Links to the sections in which a name stands in code. ``but``: a section that names all of them."""
    found = re.compile("|".join(rf"(?<![\w-]){re.escape(each)}(?![\w-])" for each in spellings))
    links = [
        f"[{heading.replace('`', '')}](../{name}#{anchor(heading)})"
        for name in EXPLAINED_IN
        for heading, text in sections(name)
        if heading not in ("", but)
        and any(found.search(each) for each in re.findall(r"`[^`\n]+`|^\$ .*|^[a-z_]+ = .*", text, re.M))
    ]
    return links[:MOST_LINKS]


def _see(links: Iterable[str]) -> Iterator[str]:
    joined = " · ".join(links)
    if joined:
        yield from (f"See {joined}", "")


def _of_type(annotation: Any) -> str:
    """A type as a user writes its values."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{each}`" for each in typing.get_args(annotation))
    names = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "Path": "a path"}
    parts = typing.get_args(annotation) or (annotation,)
    bare = [typing.get_args(each)[0] if typing.get_origin(each) is typing.Annotated else each for each in parts]
    [kind] = [each for each in bare if isinstance(each, type) and each is not type(None)]
    return names[kind.__name__]


def settings() -> Iterator[str]:
    """Every setting of `serve`: its flag, its variable, its name in a file."""
    from ferrum_rpc.config import ENV_PREFIX, GROUPS, SETTINGS

    yield from ("# Settings of `ferrum-rpc serve`", "", GENERATED, "")
    yield (
        "A setting is a flag, an environment variable or a line of a TOML file, in this order of precedence; see "
        "[operations](../operations.md). `plan` and `doctor` take the same settings. Sizes are bytes, or have a unit: "
        "`4GiB`. A flag that is true or false has a `--no-` form."
    )
    for name, field in SETTINGS.items():
        if name in GROUPS:
            yield from ("", f"## {_capitalised(GROUPS[name])}", "")
        flag = f"--{name.replace('_', '-')}"
        default = "none" if field.default in (None, "") else f"`{field.default}`"
        bounds = [
            f"{sign} {value}"
            for each in field.metadata
            for sign, value in (
                ("at least", getattr(each, "ge", None)), ("above", getattr(each, "gt", None)),
                ("at most", getattr(each, "le", None)), ("below", getattr(each, "lt", None)),
            )
            if value is not None
        ]  # fmt: skip
        what = "; ".join(filter(None, (_of_type(field.annotation), ", ".join(bounds))))
        yield from (f"### `{flag}` {{ #{name} }}", "")
        yield from (f"{_capitalised(field.description or '')}.", "")
        yield from (f"Default: {default} · {what} · `{ENV_PREFIX}{name.upper()}` · `{name}` in a file", "")
        yield from _see(_mentions(flag, *[name] * ("_" in name)))  # other names are words of the contract too


def commands() -> Iterator[str]:
    """The help of every command."""
    from ferrum_rpc.cli import build_parser

    parser, named = build_parser(settings=False)
    yield from ("# Commands", "", GENERATED, "", "[Quickstart](../quickstart.md#commands) shows them in use.", "")
    yield from ("```text", *_help(parser), "```", "")
    for name, command in named.items():
        yield from (f"## `ferrum-rpc {name}` {{ #{name} }}", "", "```text", *_help(command), "```", "")
        if name in {"serve", "plan", "doctor"}:
            yield from ("It takes all [settings](settings.md) too.", "")


def _help(parser: Any) -> list[str]:
    import argparse

    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    return [str(line) for line in parser.format_help().strip().splitlines()]


def metrics() -> Iterator[str]:
    """Every metric of an executor."""
    explained = {
        name: _copied(cells[-1], "operations.md", "metrics.md")
        for cells in rows(page("operations.md"), "metric", "limit")
        for name in re.findall(r"`(ferrum_\w+)`", cells[0])
    }
    yield from ("# Metrics", "", GENERATED, "")
    yield (
        "`--metrics-port` serves them in Prometheus' format; see [operations](../operations.md#metrics), and its "
        "[alerts](../operations.md#alerts). A histogram has the series `_bucket`, `_sum` and `_count`. The metrics of "
        "the process (`process_*`) come with them."
    )
    for each in metric_families():
        labels = f", labels {', '.join(f'`{label}`' for label in each.labels)}" if each.labels else ""
        yield from ("", f"## `{each.name}` {{ #{each.name} }}", "")
        yield from (f"{each.kind.capitalize()}{labels}. {each.text}", "")
        if each.name.endswith("_limit"):
            yield f"It is set by {explained[each.name]}."
        else:
            yield f"{_capitalised(explained[each.name])}."


def log_events() -> Iterator[str]:
    """Every event of the log."""
    events, _ = logged_events()
    yield from ("# Log events", "", GENERATED, "")
    yield (
        "One event a line, on standard error: [the log](../operations.md#the-log). Every event has `event`, `level` "
        "and `timestamp`; `action` says what you can do about it. Events of level debug are not listed."
    )
    for names, level, meaning, do in rows(page("operations.md"), "event"):
        for name in re.findall(r"`(\w+)`", names):
            yield from ("", f"## `{name}` {{ #{name} }}", "")
            yield from (f"Level: {level}. Meaning: {_copied(meaning, 'operations.md', 'log-events.md')}.", "")
            if do:
                yield from (f"What to do: {_copied(do, 'operations.md', 'log-events.md')}.", "")
            if name in events:
                yield f"Logged by {', '.join(f'`{path}`' for path in sorted(events[name]))}."


def _explained_errors() -> dict[str, list[tuple[str, str]]]:
    """What happened and what to do, by reason; a row without a reason continues the one above."""
    found: dict[str, list[tuple[str, str]]] = {}
    reason = ""
    for _, name, happened, do in rows(page("contract.md"), "code"):
        reason = name.strip("`") or reason
        found.setdefault(reason, []).append((happened, do))
    return found


def errors() -> Iterator[str]:
    """Every reason of a refusal."""
    from ferrum_rpc import client
    from ferrum_rpc.errors import ERROR_BY_REASON
    from ferrum_rpc.service.error_log import ADVICE
    from ferrum_rpc.wire.status import CODE_BY_REASON

    sets = ("NO_CAPACITY", "TRY_LATER", "SEQUENCE_GONE", "NO_ANSWER", "OUT_OF_STEP", "CALLER_ERROR")
    explained = _explained_errors()
    yield from ("# Errors", "", GENERATED, "")
    yield (
        "Every refusal has a `google.rpc.ErrorInfo` with one of these reasons; see [the contract](../contract.md"
        "#errors). The Python client raises a class for each, and has [sets of them](../client.md#errors) by what you "
        "can do."
    )
    for reason, code in CODE_BY_REASON.items():
        kind = ERROR_BY_REASON[reason]
        named = [f"`{each}`" for each in sets if kind in getattr(client, each)]
        yield from ("", f"## `{reason}` {{ #{reason} }}", "")
        of = f", in {', '.join(named)}" if named else ""
        python = f"[`{kind.__name__}`](python-client.md#ferrum_rpc.client.{kind.__name__})"
        yield from (f"Status {code.name}. Python: {python}{of}.", "")
        for happened, do in explained.get(reason, []):
            for label, text in (("What happened", happened), ("What to do", do)):
                yield from (f"{label}: {_copied(text, 'contract.md', 'errors.md')}.", "")
        if reason not in explained:
            yield from (" ".join((kind.__doc__ or "").split()), "")
        yield from (f"For operators (log level {ADVICE[reason].level}): {ADVICE[reason].action}.", "")
        yield from _see(_mentions(reason, but="Errors"))


def limits() -> Iterator[str]:
    """Every field of `GetInfo.limits`."""
    from ferrum_rpc.config import SETTINGS
    from tools.site.protos import field_comments

    yield from ("# Limits", "", GENERATED, "")
    yield (
        "`GetInfo.limits` reports them, and they do not change while the process lives. A request beyond one is "
        "refused with `INVALID_REQUEST` unless [the contract](../contract.md#limits) names another reason."
    )
    yield from ("", "| field | of | setting |", "|---|---|---|")
    for name, comment in field_comments("Limits").items():
        setting = next((each for each in (name, f"{name}_s") if each in SETTINGS), "")
        set_by = f"[`{setting}`](settings.md#{setting}), default `{SETTINGS[setting].default}`" if setting else "none"
        yield f"| `{name}`{{ #{name} }} | {comment} | {set_by} |"
