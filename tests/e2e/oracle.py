"""transformers on the very checkpoint that is served: what the rows over the wire must be, and how far off they may be.

transformers reads the folder by itself, so that configuration, tensors and arithmetic are all compared, and keeps its
rotary frequencies in float32 as it does for everybody. Its norms and softmax are float32 even in a float64 model:
errors below about 5e-7 are not ours to measure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.harness import error, worst

FLOAT32_BOUND = 2e-5
"""Largest error of a float32 logit, over the standard deviation of the logits."""

SIXTEEN_BITS_BOUND = 2.0
"""Root mean square error in 16 bits, over that of transformers in the same dtype."""


class Oracle:
    """The rows of a checkpoint by transformers: in float64, and in the checkpoint's own dtype. Remembers them."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        import transformers

        self.dtype = dtype
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        assert self._model.model.rotary_emb.inv_freq.dtype == torch.float32
        self._exact = copy.deepcopy(self._model).double()  # and every float32 frequency stays what it is
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def learn(self, paths: Iterable[tuple[int, ...]]) -> None:
        """Compute the rows of ``paths``, together where they are about equally long: what is appended to the right of a
        path to make it as long as its neighbours is seen by no row of its own."""
        groups: dict[int, list[tuple[int, ...]]] = {}
        for path in sorted({path for path in paths if path not in self._known}, reverse=True):
            group = groups.setdefault(len(path).bit_length(), [])
            if not group or group[-1][: len(path)] != path:
                group.append(path)
        for group in groups.values():
            longest = max(map(len, group))
            ids = torch.tensor([path + (0,) * (longest - len(path)) for path in group])
            with torch.inference_mode():
                truth, theirs = (model(ids, use_cache=False).logits.double() for model in (self._exact, self._model))
            for path, true, their in zip(group, truth, theirs, strict=True):
                self._known[path] = true[: len(path)], their[: len(path)]

    def rows(self, path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """``(truth, theirs)`` float64 [T, vocab]: computed in float64, and in the checkpoint's dtype."""
        if path not in self._known:
            longer = next((known for known in self._known if known[: len(path)] == path), None)
            if longer is None:
                self.learn([path])
            else:
                true, their = self._known[longer]
                self._known[path] = true[: len(path)], their[: len(path)]
        return self._known[path]

    def hidden(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """``(truth, theirs)`` float64 [T, hidden]: what the output head reads, as in `rows`."""
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode():
            truth, theirs = (
                each.model(ids, use_cache=False).last_hidden_state[0].double() for each in (self._exact, self._model)
            )
        return truth, theirs

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that transformers generates after ``tokens`` in the checkpoint's dtype."""
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        return out[0, len(tokens) :].tolist()


class Tally:
    """Rows that one call returned, beside the oracle's."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._rows: list[tuple[torch.Tensor, tuple[int, ...]]] = []

    def add(self, rows: np.ndarray, tokens: Sequence[int]) -> None:
        """``rows`` [R, vocab] are those of the last R of ``tokens``, all that the sequence holds."""
        assert rows.dtype == np.float32
        assert 0 < len(rows) <= len(tokens)
        self._rows.append((torch.tensor(rows), tuple(tokens)))

    def check(self, record: Callable[[str, Any], None]) -> None:
        """Within the bounds of the dtype; in float32 every arg-max token is transformers' too. Records the figures."""
        self._oracle.learn(path for _, path in self._rows)
        expected = [(self._oracle.rows(path), len(rows)) for rows, path in self._rows]
        ours = torch.cat([rows for rows, _ in self._rows])
        truth, theirs = (torch.cat([pair[which][-count:] for pair, count in expected]) for which in (0, 1))
        mine, other = error(ours, truth), error(theirs, truth)
        figures = {"rows": len(ours), "worst": worst(ours, truth), "rms": mine, "their_rms": other}
        for name, value in figures.items():
            record(name, value)
        if self._oracle.dtype == torch.float32:
            assert figures["worst"] <= FLOAT32_BOUND, figures
            for each in (truth, theirs):
                assert torch.equal(ours.argmax(-1), each.argmax(-1))
        else:
            assert mine <= SIXTEEN_BITS_BOUND * other, figures
