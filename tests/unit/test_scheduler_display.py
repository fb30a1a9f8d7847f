"""What a person sees: finished texts on a pipe, a stream for one prompt, panels on a terminal, a summary."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from clients.scheduler import prompts
from clients.scheduler.display import LiveDisplay, PlainDisplay, display_for
from clients.scheduler.options import parse
from clients.scheduler.report import Summary, method_rows, summarise
from clients.scheduler.text import ByteTokenizer
from ferrum_rpc.client import Greedy, MethodCount, Pressure, Sample
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage

BYTES = ByteTokenizer()


def requests(count: int) -> list[Request]:
    return [Request(at, (1, 2), 9, text=f"prompt {at + 1},") for at in range(count)]


def write(display: PlainDisplay | LiveDisplay, request: Request, text: str) -> None:
    for token in text.encode():
        request.generated.append(token)
        display.token(request, token)


def finish(display: PlainDisplay | LiveDisplay, request: Request, ending: RequestEnd = RequestEnd.LENGTH) -> None:
    request.stage, request.ending = Stage.FINISHED, ending
    display.changed(request)


def test_several_prompts_print_their_texts_as_they_end():
    out = io.StringIO()
    one, two = requests(2)
    with PlainDisplay([one, two], BYTES, out) as display:
        write(display, one, " first")
        write(display, two, " sécond")
        assert out.getvalue() == ""
        finish(display, two)
        finish(display, one, RequestEnd.STOP)
    assert out.getvalue() == "[2] 8 tokens, length: prompt 2, sécond\n[1] 6 tokens, end of text: prompt 1, first\n"


def test_a_single_prompt_streams():
    out = io.StringIO()
    [one] = requests(1)
    display = PlainDisplay([one], BYTES, out)
    seen = []
    for character in "hé!":
        write(display, one, character)
        seen.append(out.getvalue())
    assert seen == ["prompt 1,h", "prompt 1,hé", "prompt 1,hé!"]
    finish(display, one)
    assert out.getvalue() == "prompt 1,hé!\n(4 tokens, length)\n"


def test_a_failure_is_told_with_its_reason():
    out = io.StringIO()
    one, two = requests(2)
    one.stage, one.failure = Stage.FAILED, InvalidRequest("the prompt is too long")
    PlainDisplay([one, two], BYTES, out).changed(one)
    assert out.getvalue() == "[1] failed: the prompt is too long\n"


def terminal(out: io.StringIO) -> Console:
    return Console(file=out, width=100, height=12, force_terminal=True, color_system=None)


def test_panels_end_as_whole_texts_with_a_summary():
    out = io.StringIO()
    one, two = both = requests(2)
    display = LiveDisplay(both, BYTES, terminal(out))
    with display:
        write(display, one, " and so on" * 50)
        finish(display, one)
        two.stage, two.failure = Stage.FAILED, InvalidRequest("the prompt is too long")
        display.changed(two)
    assert out.getvalue().count("and so") >= 49
    assert "the prompt is too long" in out.getvalue()
    display.summary(Summary([("steps", "7")], [("Decode", 1, 20, 0, 0)]))
    assert "Decode" in out.getvalue()


def test_a_panel_shows_where_its_prompt_stands_and_the_end_of_its_text():
    both = requests(3)
    out = io.StringIO()
    display = LiveDisplay(both, BYTES, terminal(out))
    both[0].stage = Stage.RUNNING
    both[1].preemptions = 2
    write(display, both[0], " and then" * 40 + " the end")
    write(display, both[1], "\x1b[2Jquiet")
    display._console.print(display._render())
    shown = out.getvalue()
    assert "1 · 368 tokens, running" in shown
    assert "2 · 9 tokens, waiting, preempted 2×" in shown
    assert "the end" in shown
    assert "prompt 1," not in shown, "it has scrolled away"
    assert "␛[2Jquiet" in shown
    assert len(shown.splitlines()) <= 12
    finish(display, both[0])
    display._console.print(display._grid(lines=None))
    assert "prompt 1, and then" in out.getvalue()


def test_on_a_terminal_it_is_live_unless_rich_is_missing(monkeypatch):
    def is_live(plain: bool = False) -> bool:
        return isinstance(display_for(requests(1), BYTES, plain=plain), LiveDisplay)

    monkeypatch.setenv("TERM", "xterm")
    assert not is_live()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert is_live() and not is_live(plain=True)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert not is_live()


def test_the_summary_tells_rates_latency_batches_and_every_rpc():
    done = requests(3)
    for at, request in enumerate(done):
        request.arrived, request.first_token = 1.0, 1.1 + at / 10
        request.stage = Stage.FINISHED
        request.generated = [0] * 10
    run = RunCounts(done, wall_seconds=2.0, preemptions=4, rebuilds=1)
    run.step(prompt=100, decode=2, sequences=4, seconds=0.5, executor_seconds=0.25)
    run.step(prompt=0, decode=30, sequences=2, seconds=0.25, executor_seconds=0.125)
    run.saw(Pressure(3, 4, 16, 0, 0, 0))
    run.saw(Pressure(1, 4, 16, 0, 0, 0))
    figures = dict(summarise(run, None, None).figures)
    assert figures["requests"] == "3 of 3"
    assert figures["generated"] == "30 tokens, 15 tokens/s"
    assert figures["prefill"] == "100 tokens, 200 tokens/s"
    assert figures["decode"] == "32 tokens, 120 tokens/s in pure steps"
    assert figures["time to first token"] == "p50 200.0 ms"
    assert figures["steps"] == "2, mean batch 3.0"
    assert figures["time in the executor"] == "50% of the steps"
    assert (figures["preemptions"], figures["rebuilt sequences"], figures["cache use, peak"]) == ("4", "1", "75.0%")
    figures = dict(summarise(RunCounts(()), None, None).figures)
    assert (figures["generated"], figures["time to first token"]) == ("0 tokens, -", "-"), "of a run of nothing"


def test_rpcs_are_counted_between_two_moments_busiest_first():
    before = [MethodCount("s/Decode", 10, 1, 10, 0), MethodCount("s/Idle", 3, 0, 0, 0)]
    after = [before[1], MethodCount("s/Release", 2, 0, 0, 0), MethodCount("s/Decode", 15, 2, 25, 3)]
    assert method_rows(before, after) == [("Decode", 5, 15, 1, 3), ("Release", 2, 0, 0, 0)]


def test_the_plain_summary_is_aligned():
    out = io.StringIO()
    PlainDisplay([], BYTES, out).summary(Summary([("a", "1"), ("long name", "2")], [("Decode", 1, 20, 0, 0)]))
    lines = out.getvalue().splitlines()
    assert lines[1:3] == ["a          1", "long name  2"]
    assert len(lines[4]) == len(lines[5])


# --- the command line -----------------------------------------------------------------------------------------------


def test_without_prompts_the_demo_runs():
    assert parse([]).prompts == parse(["--demo"]).prompts == prompts.DEMO_PROMPTS
    assert len(prompts.DEMO_PROMPTS) == 8
    assert all(text.isascii() for text in prompts.DEMO_PROMPTS)


def test_flags_and_a_file_have_the_prompts_and_greedy_is_a_temperature_of_nothing(tmp_path):
    assert parse(["--prompt", "a", "--prompt", "b"]).prompts == ("a", "b")
    file = tmp_path / "prompts"
    file.write_text("one\n\n two \n")
    assert parse(["--prompts-file", str(file)]).prompts == ("one", " two ")
    assert parse(["--greedy"]).sampling == parse(["--temperature", "0"]).sampling == Greedy()
    assert parse(["--seed", "5"]).sampling == Sample(0.6, 40, 0.95, seed=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "must be at least 1, not 0"),
        (["--temperature", "-1"], "are needed"),
        (["--prompts-file", "/nowhere"], "cannot read /nowhere"),
        (["--prompt", ""], "a prompt is empty"),
        (["--prompt", "a", "--demo"], "not allowed with"),
        (["--prompts-file", "/dev/null"], "has no prompts"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err
