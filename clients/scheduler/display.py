"""What a person sees during a run: a panel per prompt on a terminal, otherwise finished texts."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Self, TextIO

from clients.scheduler.report import Summary
from clients.scheduler.text import Tokenizer, printable
from ferrum_rpc.scheduler import Observer, Request, RequestEnd, Stage, TextStream

if TYPE_CHECKING:
    from rich.console import Console

METHOD_HEADINGS = ("RPC", "calls", "items", "failed calls", "refused items")


class Display(Observer, AbstractContextManager[Any]):
    """Shows a run and its summary. A context manager around the run. ``texts``: the text of each request so far, by its
    index, without control sequences."""

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer) -> None:
        self._requests = requests
        self._streams = defaultdict[int, TextStream](lambda: TextStream(tokenizer))
        self._there: dict[str, str] = {}
        self.texts = defaultdict[int, str](str)

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def summary(self, summary: Summary) -> None:
        """The run is over."""

    def _next(self, request: Request, token: int) -> str:
        """The new piece of text."""
        return self._add(request, self._streams[request.index].push(token))

    def _rest(self, request: Request) -> str:
        """The piece that was held back, once."""
        stream = self._streams.pop(request.index, None)
        return "" if stream is None else self._add(request, stream.finish())

    def _add(self, request: Request, piece: str) -> str:
        piece = printable(piece)
        self.texts[request.index] += piece
        return piece


class PlainDisplay(Display):
    """Lines for logs and pipes: each text when it is finished. A single prompt streams."""

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer, out: TextIO | None = None) -> None:
        super().__init__(requests, tokenizer)
        self._out = out if out is not None else sys.stdout
        self._single = len(requests) == 1
        self._begun = False

    def __exit__(self, *_: object) -> None:
        self._out.flush()

    def token(self, request: Request, token: int) -> None:
        """Stream a single prompt, collect several."""
        self._stream(request, self._next(request, token))

    def changed(self, request: Request) -> None:
        """Print what has ended."""
        number = f"[{request.index + 1}]"
        if request.stage is Stage.FAILED:
            self._print(f"{number} failed: {request.error}")
        elif request.stage is Stage.FINISHED:
            self._stream(request, self._rest(request))
            text = f"{printable(request.text)}{self.texts[request.index]}"
            self._print(f"\n({_ending(request)})" if self._single else f"{number} {_ending(request)}: {text}")

    def executors(self, there: Sequence[tuple[str, str]]) -> None:
        """Print the changes. The executors known at the start are not printed."""
        before, self._there = self._there, dict(there)
        news = [f"{target} is {how}" for target, how in there if before.get(target) not in {how, None}]
        news += [f"{target} is there" for target in self._there.keys() - before.keys() if before]
        news += [f"{target} is gone" for target in before.keys() - self._there.keys()]
        for each in sorted(news):
            self._print(f"[executor] {each}")

    def summary(self, summary: Summary) -> None:
        """Two aligned lists."""
        width = max(len(name) for name, _ in summary.figures)
        self._print("\n" + "\n".join(f"{name:<{width}}  {figure}" for name, figure in summary.figures))
        if summary.methods:
            rows = [METHOD_HEADINGS, *(tuple(map(str, row)) for row in summary.methods)]
            first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
            self._print("")
            for row in rows:
                numbers = (f"{cell:>{width}}" for cell, width in zip(row[1:], others, strict=True))
                self._print("  ".join((f"{row[0]:<{first}}", *numbers)))

    def _stream(self, request: Request, piece: str) -> None:
        if self._single:
            self._out.write(piece if self._begun else printable(request.text) + piece)
            self._out.flush()
            self._begun = True

    def _print(self, line: str) -> None:
        self._out.write(line + "\n")


class LiveDisplay(Display):
    """A panel per prompt that streams, in two columns."""

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(requests, tokenizer)
        self._console = console or Console()
        # A renderable that is asked at each refresh: tokens come faster than a terminal can show them.
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=12, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._live.stop()
        if kind is None:
            self._console.print(self._grid(lines=None))
            if len(self._there) > 1:
                self._console.print(self._executors())

    def token(self, request: Request, token: int) -> None:
        """Shown at the next refresh."""
        self._next(request, token)

    def changed(self, request: Request) -> None:
        """Shown at the next refresh."""
        if request.stage in (Stage.FINISHED, Stage.FAILED):
            self._rest(request)

    def executors(self, there: Sequence[tuple[str, str]]) -> None:
        """Shown as a table if there are several."""
        now = dict(there)
        self._there = {target: now.get(target, "gone") for target in [*self._there, *now]}

    def summary(self, summary: Summary) -> None:
        """Two tables."""
        from rich.table import Table

        figures = Table(box=None, show_header=False)
        for name, figure in summary.figures:
            figures.add_row(name, f"[bold]{figure}[/]")
        self._console.print(figures)
        if summary.methods:
            methods = Table(*METHOD_HEADINGS, box=None)
            for column in methods.columns[1:]:
                column.justify = "right"
            for row in summary.methods:
                methods.add_row(*map(str, row))
            self._console.print(methods)

    def _render(self) -> Any:
        from rich.console import Group

        rows, above = -(-len(self._requests) // self._columns), len(self._there) + 1 if len(self._there) > 1 else 0
        grid = self._grid(lines=max(1, (self._console.height - 1 - above) // rows - 2))
        return Group(self._executors(), grid) if above else grid

    def _executors(self) -> Any:
        """The executors and the requests at each."""
        from rich.table import Table

        table = Table("executor", "", "has", "finished", box=None)
        for target, how in self._there.items():
            there = [each for each in self._requests if each.executor == target]
            has = [each.index + 1 for each in there if each.stage in (Stage.RUNNING, Stage.MOVING)]
            ended = sum(each.stage is Stage.FINISHED for each in there)
            colour = {"gone": "red", "hung": "red", "draining": "yellow"}.get(how, "green")
            table.add_row(target, f"[{colour}]{how}[/]", " ".join(map(str, has)), str(ended))
        return table

    @property
    def _columns(self) -> int:
        return 2 if len(self._requests) > 1 and self._console.width >= 80 else 1

    def _grid(self, lines: int | None) -> Any:
        from rich.table import Table

        grid = Table.grid(expand=True)
        for _ in range(self._columns):
            grid.add_column(ratio=1)
        panels = [self._panel(request, lines) for request in self._requests]
        for at in range(0, len(panels), self._columns):
            grid.add_row(*panels[at : at + self._columns])
        return grid

    def _panel(self, request: Request, lines: int | None) -> Any:
        from rich.panel import Panel
        from rich.text import Text

        text = Text()
        text.append(printable(request.text), style="dim")
        text.append(self.texts[request.index])
        if request.error:
            text.append(f"\n{request.error}", style="red")
        if lines is not None:
            width = max(10, self._console.width // self._columns - 4)
            wrapped = text.wrap(self._console, width)
            text = Text("\n").join(list(wrapped)[-lines:])
        colour = {Stage.WAITING: "dim", Stage.FINISHED: "green", Stage.FAILED: "red"}.get(request.stage, "cyan")
        title = f"{request.index + 1} · {_ending(request)}"
        return Panel(text, title=title, title_align="left", border_style=colour, height=lines and lines + 2)


def _ending(request: Request) -> str:
    """The state of a request, in a few words."""
    tokens = f"{len(request.generated)} tokens"
    if request.ending is RequestEnd.ERROR:
        return f"{tokens}, failed"
    preempted = f", preempted {request.preemptions}×" if request.preemptions and request.ending is None else ""
    rebuilt = f", rebuilt {request.rebuilds}×" if request.rebuilds else ""
    return f"{tokens}, {(request.ending or request.stage).value}{preempted}{rebuilt}"


def display_for(requests: Sequence[Request], tokenizer: Tokenizer, *, plain: bool) -> Display:
    """Panels on a terminal; lines if ``plain``, without a terminal, or if rich is not installed."""
    if not plain and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        with suppress(ImportError):
            return LiveDisplay(requests, tokenizer)
    return PlainDisplay(requests, tokenizer)
