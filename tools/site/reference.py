"""Pages of the reference, generated from the sources: settings, commands, metrics, log events, errors, limits.

Names, types and defaults come from the code. Explanations are the rows of the tables in `docs/`, which tests compare
with the code; a page links the sections in which a name occurs, so that nothing is explained twice. `templates` has the
text around them.
"""

from __future__ import annotations

import argparse
import re
import typing
from pathlib import Path
from typing import Any, Final

import jinja2

from tools.site.links import relinked
from tools.site.sources import anchor, logged_events, metric_families, page, rows, sections

EXPLAINED_IN: Final = ("contract.md", "operations.md", "fleet.md", "openai.md", "client.md", "quickstart.md")
"""Pages whose sections a reference links, in this order."""
MOST_LINKS: Final = 4
ERROR_SETS: Final = ("NO_CAPACITY", "TRY_LATER", "SEQUENCE_GONE", "NO_ANSWER", "OUT_OF_STEP", "CALLER_ERROR")
TYPES: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "Path": "a path",
}
BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def pages() -> dict[str, str]:
    """The text of each page by its path on the site."""
    made = (settings, commands, metrics, log_events, errors, limits)
    names = {each.__name__.replace("_", "-"): each for each in made}
    return {f"reference/{name}.md": rendered(name, **data()) for name, data in names.items()}


def rendered(template: str, **data: Any) -> str:
    """A page of `templates`."""
    environment = jinja2.Environment(  # noqa: S701 - Markdown of our own
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"sentence": _sentence, "kind": _kind, "help": _help, "repr": repr, "cell": _cell}
    return environment.get_template(f"{template}.md.j2").render(data) + "\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|")


def _copied(cell: str, source: str, target: str) -> str:
    """A cell of a table in `docs/`, with links that are right on another page."""
    return relinked(cell, f"docs/{source}", f"reference/{target}").replace("\\|", "|")


def _see(*spellings: str, but: str = "") -> str:
    """Links to the sections in which a name stands in code. ``but``: a section that names all of them."""
    found = re.compile("|".join(rf"(?<![\w-]){re.escape(each)}(?![\w-])" for each in spellings))
    links = [
        f"[{heading.replace('`', '')}](../{name}#{anchor(heading)})"
        for name in EXPLAINED_IN
        for heading, text in sections(name)
        if heading not in ("", but)
        and any(found.search(each) for each in re.findall(r"`[^`\n]+`|^\$ .*|^[a-z_]+ = .*", text, re.M))
    ]
    return f"See {' · '.join(links[:MOST_LINKS])}" if links else ""


def _kind(field: Any) -> str:
    """A setting's type as a user writes its values, and their bounds."""
    bounds = [
        f"{sign} {value}"
        for each in field.metadata
        for name, sign in BOUNDS.items()
        if (value := getattr(each, name, None)) is not None
    ]
    return "; ".join(filter(None, (_of_type(field.annotation), ", ".join(bounds))))


def _of_type(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{each}`" for each in typing.get_args(annotation))
    parts = typing.get_args(annotation) or (annotation,)
    bare = [typing.get_args(each)[0] if typing.get_origin(each) is typing.Annotated else each for each in parts]
    [kind] = [each for each in bare if isinstance(each, type) and each is not type(None)]
    return TYPES[kind.__name__]


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    return parser.format_help().strip()


def settings() -> dict[str, Any]:
    """Every setting of `serve`: its flag, its variable, its name in a file."""
    from ferrum_rpc.config import ENV_PREFIX, GROUPS, SETTINGS

    return {"settings": SETTINGS, "groups": GROUPS, "prefix": ENV_PREFIX, "see": _see}


def commands() -> dict[str, Any]:
    """The help of every command."""
    from ferrum_rpc.cli import build_parser

    return dict(zip(("parser", "commands"), build_parser(settings=False), strict=True))


def metrics() -> dict[str, Any]:
    """Every metric of an executor."""
    explained = {
        name: _copied(cells[-1], "operations.md", "metrics.md")
        for cells in rows(page("operations.md"), "metric", "limit")
        for name in re.findall(r"`(ferrum_\w+)`", cells[0])
    }
    return {"families": metric_families(), "explained": explained}


def log_events() -> dict[str, Any]:
    """Every event of the log."""
    logged, _ = logged_events()
    events = [
        (name, level, *(_copied(each, "operations.md", "log-events.md") for each in texts), logged.get(name))
        for names, level, *texts in rows(page("operations.md"), "event")
        for name in re.findall(r"`(\w+)`", names)
    ]
    return {"events": events}


def errors() -> dict[str, Any]:
    """Every reason of a refusal. What happened and what to do: a row without a reason continues the one above."""
    from ferrum_rpc import client
    from ferrum_rpc.errors import ERROR_BY_REASON
    from ferrum_rpc.service.error_log import ADVICE
    from ferrum_rpc.wire.status import CODE_BY_REASON

    explained: dict[str, list[tuple[str, ...]]] = {}
    reason = ""
    for _, name, *texts in rows(page("contract.md"), "code"):
        reason = name.strip("`") or reason
        explained.setdefault(reason, []).append(tuple(_copied(each, "contract.md", "errors.md") for each in texts))
    sets = {
        reason: [name for name in ERROR_SETS if ERROR_BY_REASON[reason] in getattr(client, name)]
        for reason in CODE_BY_REASON
    }
    found = {"codes": CODE_BY_REASON, "kinds": ERROR_BY_REASON, "advice": ADVICE}
    return found | {"explained": explained, "sets": sets, "see": _see}


def limits() -> dict[str, Any]:
    """Every field of `GetInfo.limits`."""
    from ferrum_rpc.config import SETTINGS
    from tools.site.protos import field_comments

    return {"limits": field_comments("Limits"), "settings": SETTINGS}
