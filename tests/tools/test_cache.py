"""`benchmarks.cache` tells how far answers move, and its page shows it."""

from __future__ import annotations

import numpy as np

from benchmarks.cache import EXACT, divergence
from benchmarks.sections import cache
from benchmarks.targets import TARGETS
from tests.tools.conditions import conditions

RESULT = {
    "cells": [],
    "answers": [{"model": "demo", "context": 288, "rows": 2, "kl_mean": 1e-4, "kl_largest": 2e-4, "same_tokens": 0.5}],
    "settings": {"threads": 2, "rounds": 5, "lead_in_steps": 2, "seed": 0},
    **conditions("cache"),
}


def test_the_divergence_is_that_of_its_definition() -> None:
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]], dtype=np.float32)) + 3
    moved = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], dtype=np.float32)) - 70
    kl = 0.25 * np.log(2)
    assert divergence(exact, moved) == {
        "rows": 2,
        "kl_mean": float(f"{kl / 2:.3g}"),
        "kl_largest": float(f"{kl:.3g}"),
        "same_tokens": 0.5,
    }


def test_the_page_shows_answers_and_the_standing_its_target() -> None:
    page = cache("cache.json", RESULT)
    assert "0.0002" in page and "50.0%" in page
    [target] = [each for each in TARGETS if each.benchmark == "cache"]
    cells = [{"cell": "decode b32 @2048", "ratios": {EXACT: {"median": 1.5}}}]
    assert target.row({"cache": ("cache.json", {"cells": cells})})[1:4] == ("1.50", "≥ 1.25", "yes")
