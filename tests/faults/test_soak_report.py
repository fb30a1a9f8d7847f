"""The soak's report: what is broken is said, counted and never hidden by an average."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import soak
from tests.faults.figures import Figure, Figures, Promise, at_least, at_most, exactly, hold, number, quantile
from tests.faults.promises import PROMISES
from tests.faults.sizes import CI, FULL, Size, scaled
from tests.support.netns import NoNetwork


async def r1_holds(size: Size) -> Figures:
    return Figures("Holds", exactly("wrong", 0, 0), facts={"handles": size.handles})


async def r2_breaks(size: Size) -> Figures:
    return Figures("Breaks", exactly("lost | twice", 1, 0, "tokens"), at_most("late", 0.5, 1.0, "s"))


async def r3_raises(size: Size) -> Figures:
    raise ValueError("the server never came")


async def r4_measures_nothing(size: Size) -> Figures:
    return Figures("Empty")


async def r5_cannot_run(size: Size) -> Figures:
    raise NoNetwork("network namespaces need root")


@pytest.mark.parametrize(
    ("promise", "broken"),
    [
        (r1_holds, []),
        (r2_breaks, ["lost | twice: 1 tokens, promised = 0 tokens"]),
        (r3_raises, ["ValueError: the server never came"]),
        (r4_measures_nothing, ["nothing was measured"]),
        (r5_cannot_run, []),
    ],
)
def test_a_promise_is_broken_by_a_figure_by_an_exception_and_by_silence(promise, broken: list[str]) -> None:
    assert soak.run(promise, CI)["broken"] == broken


def test_a_soak_knows_its_machine_and_its_commit() -> None:
    found = soak.facts()
    assert found.keys() == {"machine", "hardware", "versions", "commit"}
    assert found["hardware"]["cores"] >= 1 and found["commit"].keys() == {"id", "dirty"}


def test_the_report_has_a_row_for_every_figure_and_says_which_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "PROMISES", (r1_holds, r2_breaks, r5_cannot_run))
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    entries = {each.__name__: soak.run(each, CI) | {"machine": "here"} for each in soak.PROMISES}
    soak.write({"promises": entries}, tmp_path)
    text = (tmp_path / "docs" / "soak.md").read_text()
    assert "| **R1** Holds | wrong | 0 | = 0 | holds |" in text
    assert "| **R2** Breaks | lost \\| twice | 1 tokens | = 0 tokens | **broken** |" in text
    assert "|  | late | 0.5 s | <= 1 s | holds |" in text
    assert "network namespaces need root | | | skipped |" in text
    assert "UTC, here, size" in text, "results of several machines stand in one report"
    assert (
        json.loads((tmp_path / "benchmarks" / "results" / "soak.json").read_text())["promises"].keys() == entries.keys()
    )


def test_a_share_of_the_counts_is_at_least_one_and_leaves_seconds_alone() -> None:
    small = scaled(FULL, 0.001)
    assert (small.handles, small.drains, small.lease_s) == (1_000, 1, FULL.lease_s)
    assert small.leak_whole_lives is FULL.leak_whole_lives


def test_every_promise_is_tried_once_and_full_is_nowhere_smaller_than_ci() -> None:
    tried = [each.__name__ for each in PROMISES]
    files = [each for each in Path(__file__).parent.glob("*.py") if not each.name.startswith("test_")]
    once = [each for each in tried if "_with_" not in each]
    assert sorted(once) == sorted(re.findall(r"^async def (r\d+_\w+)\(", "".join(map(Path.read_text, files)), re.M))
    assert len({*tried}) == len(tried) and {each.partition("_with_")[0] for each in tried} == {*once}
    known = {f"R{n}" for n in range(1, 37)}
    assert {f"R{n}" for n in range(1, 25)} <= {number(each) for each in PROMISES} <= known
    counts = [name for name in Size.__dataclass_fields__ if isinstance(getattr(CI, name), int)]
    assert all(getattr(FULL, name) >= getattr(CI, name) for name in counts)


def test_programs_that_faults_start_import_no_torch() -> None:
    """It takes three seconds of a processor, of each of them."""
    files = [each for each in Path(__file__).parent.glob("*.py") if not re.match("test_|soak", each.name)]
    programs = [each.stem for each in files if '__name__ == "__main__"' in each.read_text()]
    assert len(programs) == 5
    imports = "; ".join(f"import tests.faults.{each}" for each in programs)
    command = [sys.executable, "-c", f"import sys; {imports}; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, cwd=soak.ROOT, check=False).returncode == 0


def test_figures_judge_by_their_relation() -> None:
    assert at_least("a", 2, 2).holds and not at_least("a", 1, 2).holds
    assert at_most("a", 2, 2).holds and not at_most("a", 3, 2).holds
    assert quantile([float(n) for n in range(100)], 0.99) == 99.0


async def test_times_alone_are_tried_once_more() -> None:
    tried = 0

    def promise(*figures: Figure, then: Figure) -> Promise:
        async def r30_slow(_: Size) -> Figures:
            nonlocal tried
            tried += 1
            return Figures("Slow", *figures if tried == 1 else (*figures[1:], then))

        return r30_slow

    slow, quick, lost = at_most("p99", 4, 3, "x"), at_most("p99", 2, 3, "x"), exactly("lost", 1, 0)
    await hold(promise(slow, then=quick))
    assert tried == 2
    for figures, most in (((slow,), 2), ((lost,), 1), ((slow, lost), 1)):
        tried = 0
        with pytest.raises(AssertionError, match=r"R30: "):
            await hold(promise(*figures, then=slow))
        assert tried == most
