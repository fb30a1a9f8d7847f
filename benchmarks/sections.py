"""The sections of `docs/benchmarks.md`: each run of a benchmark, with the conditions under which it was taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks import prefix_tables, tables
from benchmarks.tables import TEXTS, Table


def cells(name: str, result: Any) -> str:
    """One run of `benchmarks.suite`, `benchmarks.peers` or `benchmarks.gpu`. What did not run is said, never left
    out."""
    kind = result["benchmark"]
    parts = [TEXTS[kind], *_table(tables.cells(result.get("cells", ())), "" if kind == "peers" else "cells")]
    parts += _table(tables.outputs(result.get("outputs", ())), "outputs")
    if "two_ranks" in result:
        parts += [*_table(tables.cells(result["two_ranks"]["cells"])), f"- two ranks: {result['two_ranks']['said']}"]
    parts += [*_table(tables.parts(result)), *_table(tables.attention(result))]
    for suite, found in result.get("tests", {}).items():
        counts = ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
        parts.append(f"- `{suite}`: {counts}")
    parts += [f"- missed or failed: {each}" for each in result.get("failed", ())]
    left_out = "".join(f"- {side} was left out: {reason}\n" for side, reason in result.get("left_out", {}).items())
    return "\n".join([*parts, left_out, tables.limit_line(result), "", conditions(name, result, _facts(result))])


def _table(table: Table, legend: str = "") -> list[str]:
    if not table.rows:
        return []
    return [table.markdown(), "", *([_legend(legend), ""] if legend else [])]


def _legend(name: str) -> str:
    return "\n".join(f"- **{term}**: {text}" for term, text in TEXTS["legend"][name].items())


def _facts(result: Any) -> list[tuple[str, str]]:
    settings, model = result["settings"], result["model"]
    size = f"{model['parameters'] / 1e6:,.0f} million parameters, {model['dtype']}, random weights"
    sides = [(name, _side(facts)) for name, facts in result.get("sides", {}).items()]
    turns = f"{settings['rounds']} of each side, of about {settings['round_s']:g} s"
    repeated, kept = _disturbed(result.get("cells", ()))
    spins = "; llama.cpp by its own default" if any(name.startswith("llama") for name, _ in sides) else ""
    device = [("GPU", settings["gpu"])] if "gpu" in settings else []
    return [
        *device,
        ("model", f"{model['name']}: {size}"),
        *sides,
        ("rounds", f"{turns}; disturbed by other processes: {repeated} repeated, {kept} kept"),
        ("OpenMP waits", f"{settings['openmp_waits']}{spins}"),
        ("output", settings["output"]),
        ("seed", str(settings["seed"])),
    ]


def _side(facts: Mapping[str, Any]) -> str:
    more = [f"`{choice}`" for choice in facts.get("choices", ())]
    more += [f"{package} {number}" for package, number in facts.get("versions", {}).items()]
    return ", ".join([facts["name"], f"{facts['threads']} threads", *more])


def _disturbed(cells: Sequence[Any]) -> list[int]:
    return [sum(cell["disturbed"][index] for cell in cells) for index in (0, 1)]


def wire(name: str, result: Any) -> str:
    """One run of `benchmarks.wire`."""
    cells, settings = result["cells"], result["settings"]
    parts = [TEXTS["wire"]]
    for model in result["models"]:
        table = tables.wire([cell for cell in cells if cell["model"] == model["name"]]).markdown()
        parts.append(f"### {model['name']}\n\n{_model(model)}\n\n{table}\n")
    same, of = (sum(cell["sides"][tables.IN_PROCESS]["same_rounds"][index] for cell in cells) for index in (0, 1))
    repeated, kept = _disturbed(cells)
    agreement = (
        f"The last rows of {same} of {of} pairs of rounds were bitwise the same on both sides. "
        f"Other processes disturbed {repeated + kept} pairs (by the kernel's accounts, not by the figures): "
        f"{repeated} were repeated, {kept} kept."
    )
    rows = [
        ("threads", f"{settings['threads_in_process']} in process, {settings['threads_server']} in the server"),
        ("processes", settings["processes"]),
        ("transport", settings["transport"]),
        ("engine", settings.get("engine", "thread")),
        ("rounds", f"{settings['rounds']} pairs, {settings['lead_in_steps']} untimed steps at the start of each"),
        ("block size", f"{settings['block_size']} tokens"),
        ("seed", str(settings["seed"])),
    ]
    return "\n".join([*parts, _legend("wire"), "", agreement, "", conditions(name, result, rows)])


def _model(facts: Mapping[str, Any]) -> str:
    size = f"{facts['parameters'] / 1e6:,.0f} million parameters" if facts["parameters"] else "no weights"
    chosen = ", ".join(f"`{choice}`" for choice, _ in facts["choices"])
    return (
        f"{size}, vocabulary {facts['vocab_size']:,}, weights {facts['weight_dtype']}, cache {facts['kv_dtype']}, "
        f"{facts['context']} tokens of context. Chosen at start: {chosen}."
    )


def _section(kind: str, name: str, result: Any, rows: Sequence[tuple[str, str]], *found: tuple[Table, str]) -> str:
    """The text of a kind, tables, each with the name of its legend, and the conditions of the run."""
    parts = [TEXTS[kind]]
    for table, legend in found:
        parts += _table(table, legend)
    return "\n".join([*parts, conditions(name, result, rows)])


def protocol(name: str, result: Any) -> str:
    """One run of `benchmarks.protocol`."""
    settings = result["settings"]
    steps = ", ".join(f"{count} at {depth}" for depth, count in settings["steps"].items())
    sizes = "; ".join(f"{way} {asked} and {got}" for way, (asked, got) in settings["exchange_bytes"].items())
    rows = [
        ("model", settings["model"]),
        ("engine", settings.get("engine", "thread")),
        ("processes", settings["processes"]),
        ("rounds", f"{settings['rounds']}, {settings['disturbed_rounds_kept']} of them disturbed by other processes"),
        ("steps", f"of each sequence in a round: {steps}; {settings['lead_in_steps']} untimed ones before them"),
        ("context", f"{settings['context']} tokens when a round begins"),
        ("bytes", f"of a request and its answer: {sizes}"),
    ]
    return _section("protocol", name, result, rows, (tables.protocol(result["points"]), "protocol"))


def trips(name: str, result: Any) -> str:
    """One run of `benchmarks.trips`."""
    settings = result["settings"]
    rows = [
        ("model", settings["model"]),
        (
            "rounds",
            f"{settings['rounds']}, of {settings['tokens']} tokens a text, and as many decode steps beside others",
        ),
        ("seed", str(settings["seed"])),
    ]
    parts = [TEXTS["trips"], *_table(tables.trips(result["points"])), TEXTS["beside"]]
    return "\n".join([*parts, *_table(tables.beside(result["beside"]), "trips"), conditions(name, result, rows)])


def speculation(name: str, result: Any) -> str:
    """One run of `benchmarks.speculation`."""
    settings = result["settings"]
    rows = [
        ("models", f"{settings['model']}; drafts by {settings['draft']}"),
        ("rounds", f"{settings['rounds']}, of {settings['tokens']} tokens a text; runs of {settings['run_tokens']}"),
        ("seed", str(settings["seed"])),
    ]
    return _section("speculation", name, result, rows, (tables.speculation(result["points"]), "speculation"))


def streams(name: str, result: Any) -> str:
    """One run of `benchmarks.streams`."""
    settings = result["settings"]
    rows = [
        ("model", settings["model"]),
        ("texts", f"of {settings['tokens']} tokens behind {settings['prompt']} each; runs of {settings['run_tokens']}"),
        ("rounds", f"{settings['rounds']}"),
        ("seed", str(settings["seed"])),
    ]
    if "share" in result:
        rows.append(("share", f"of a tenant with one caller beside one with many, one place: {result['share']:.2f}"))
    cancels = (tables.cancels([result["cancels"]]), "cancels") if "cancels" in result else None
    return _section(
        "streams", name, result, rows, (tables.streams(result["points"]), "streams"), *filter(None, [cancels])
    )


def fronts(name: str, result: Any) -> str:
    """One run of `benchmarks.fronts`."""
    settings = result["settings"]
    rows = [
        ("model", settings["model"]),
        ("texts", f"of {settings['tokens']} tokens behind {settings['prompt']} each"),
        ("rounds", f"{settings['rounds']}"),
        ("router", f"smg {settings['smg']}"),
        ("seed", str(settings["seed"])),
    ]
    leaves = (tables.leaves(result.get("leaves", ())), "leaves")
    return _section("fronts", name, result, rows, (tables.fronts(result["points"]), "fronts"), leaves)


def grammars(name: str, result: Any) -> str:
    """One run of `benchmarks.grammars`."""
    settings = result["settings"]
    rows = [
        ("model", settings["model"]),
        ("rounds", f"{settings['rounds']}, of a run of {settings['tokens']} steps each"),
        ("seed", str(settings["seed"])),
    ]
    return _section("grammars", name, result, rows, (tables.grammars(result["points"]), ""))


def structured(name: str, result: Any) -> str:
    """One run of `benchmarks.structured`."""
    settings = result["settings"]
    rows = [
        ("model", settings["model"]),
        ("texts", f"{settings['texts']:,} of each way, {settings['at_once']} at a time"),
        ("drafts", f"of up to {settings['draft_tokens']} tokens"),
        ("seed", str(settings["seed"])),
    ]
    return _section("structured", name, result, rows, (tables.structured(result["points"]), "structured"))


def cache(name: str, result: Any) -> str:
    """One run of `benchmarks.cache`."""
    answers = (tables.answers(result["answers"]), "answers")
    return _section("cache", name, result, _rounds(result), (tables.cells(result["cells"]), "cells"), answers)


def _rounds(result: Any) -> list[tuple[str, str]]:
    settings = result["settings"]
    return [
        ("threads", f"{settings['threads']}"),
        ("rounds", f"{settings['rounds']}, {settings['lead_in_steps']} untimed steps at the start of each"),
        ("seed", str(settings["seed"])),
    ]


def adapters(name: str, result: Any) -> str:
    """One run of `benchmarks.adapters`."""
    told = ("adapters", f"{result['adapters']} of rank {result['rank']}, of all products")
    return _section("adapters", name, result, [told, *_rounds(result)], (tables.cells(result["cells"]), "cells"))


def backends(name: str, result: Any) -> str:
    """One run of `benchmarks.backends`."""
    return _section("backends", name, result, _rounds(result), (tables.cells(result["cells"]), "cells"))


def memory(name: str, result: Any) -> str:
    """One run of `benchmarks.memory`."""
    return _section("memory", name, result, [("model", result["model"])], (tables.memory(result["points"]), ""))


def transfer(name: str, result: Any) -> str:
    """One run of `benchmarks.transfer`."""
    rounds = [("rounds", str(result["settings"]["rounds"]))]
    return _section("transfer", name, result, rounds, (tables.transfer(result["points"]), ""))


def ranks(name: str, result: Any) -> str:
    """One run of `benchmarks.ranks`."""
    told = [
        (side, f"loaded in {each['start_s']:.1f} s" + "".join(f", {own / 1e6:,.0f} MB on rank 1" for own in others))
        for side, each in result["ranks"].items()
        for others in [each.get("own_bytes", [])]
    ]
    return _section("ranks", name, result, [*told, *_rounds(result)], (tables.cells(result["cells"]), "cells"))


def collectives(name: str, result: Any) -> str:
    """One run of `benchmarks.collectives`."""
    settings = [(key, str(result["settings"][key])) for key in ("ranks", "hidden", "rounds")]
    return _section("collectives", name, result, settings, (tables.collectives(result["points"]), ""))


def prefix(name: str, result: Any) -> str:
    """One run of `benchmarks.prefix`."""
    parts = [TEXTS["prefix"]]
    for part, table in prefix_tables.every(result).items():
        if table.rows:
            parts += [TEXTS["prefix_parts"][part], table.markdown(), "", _legend(part), ""]
    left_out = [f"- {side} was left out: {reason}" for side, reason in result["left_out"].items()]
    return "\n".join([*parts, *left_out, "", conditions(name, result, _facts(result))])


def conditions(name: str, result: Any, more: Sequence[tuple[str, str]]) -> str:
    """The table at the end of a section: hardware, versions and the commands that made it."""
    here, commit = result["hardware"], result["commit"]
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    others = "unknown" if result["others_cpu"] is None else f"{result['others_cpu']:.1%} of the cores' time"
    rows = [
        ("taken", f"{result['began']} to {result['ended']}"),
        ("commit", f"`{commit['id'][:12]}`{' with uncommitted changes' if commit['dirty'] else ''}"),
        ("machine", f"{here['cores']} × {here['cpu']}, {here['memory_gib']} GiB, {', '.join(here['flags'])}"),
        ("huge pages", here["huge_pages"]),
        ("other processes", others),
        ("versions", versions),
        *((("gRPC's sockets", f"read {result['sockets']}"),) if "sockets" in result else ()),  # not in older files
        *more,
        ("file", f"`benchmarks/results/{name}`"),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"| | |\n| --- | --- |\n{table}\n\n```sh\n{result['command']}\npython -m benchmarks.report\n```\n"


RENDERERS: Final[dict[str, Callable[[str, Any], str]]] = {
    "suite": cells,
    "peers": cells,
    "protocol": protocol,
    "wire": wire,
    "trips": trips,
    "speculation": speculation,
    "streams": streams,
    "fronts": fronts,
    "grammars": grammars,
    "structured": structured,
    "cache": cache,
    "adapters": adapters,
    "backends": backends,
    "memory": memory,
    "prefix": prefix,
    "transfer": transfer,
    "ranks": ranks,
    "collectives": collectives,
    "gpu": cells,
}
"""By the program whose ``benchmark`` a file has, in the order of the page."""
