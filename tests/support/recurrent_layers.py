"""A stack of recurrent layers over a slot, and the plain loop that is its oracle. Only the loop's rule in torch imports
transformers."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ferrum_rpc.attention import native_recurrent
from ferrum_rpc.attention.recurrent import RecurrentInputs, convolve, delta_chunks, split_heads
from ferrum_rpc.attention.recurrent_steps import RecurrentStore
from ferrum_rpc.core import RecurrentShape

SHAPE = RecurrentShape(key_heads=2, value_heads=4, key_dim=8, value_dim=4)

HIDDEN, VOCABULARY = 12, 7


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def new_slot(rows, layers=1, shape=SHAPE, dtype=torch.float32):
    """Of a sequence without tokens."""
    device = torch.device("cpu")
    (slot,) = RecurrentStore(shape, layers, 1, rows=rows, dtype=dtype, device=device).slots
    slot.clear()
    return slot


def after_chunk(slot, tokens):
    """A slot for the sequence when it is longer by a chunk."""
    rows, layers = slot.channels.shape[1], len(slot.folded)
    made = new_slot(rows, layers, slot.shape, slot.channels.dtype)
    made.restart(slot.length + tokens)
    return made


def close(found, wanted, bound=1e-11):
    assert found.dtype == wanted.dtype
    return bool((found - wanted).abs().max() <= bound * wanted.abs().max())


def everything(slot):
    image = slot.image()
    return [image.length, image.floor, image.folded, *(each.tolist() for each in (image.states, image.channels))]


class Stack:
    """Layers whose rows feed the next one. Each row is projected alone, so that its bits do not depend on others."""

    def __init__(self, layers, dtype=torch.float32, shape=SHAPE):
        self.shape, self.layers, self.dtype = shape, range(layers), dtype
        self.embedding = random(VOCABULARY, HIDDEN, seed=50)
        self.weights = [random(shape.channels, shape.taps, seed=layer).to(dtype) for layer in self.layers]
        width = shape.channels + 2 * shape.value_heads
        self.into = [random(HIDDEN, width, seed=10 + layer) for layer in self.layers]
        self.out = [random(shape.value_heads * shape.value_dim, HIDDEN, seed=20 + layer) for layer in self.layers]

    def slot(self, rows=18):
        """By default with a journal for a step of 5 tokens behind another, and one more under way."""
        return new_slot(rows, len(self.layers), self.shape, self.dtype)

    def embedded(self, tokens):
        return [self.embedding[token] for token in tokens]

    def inputs(self, layer, hidden):
        rows = torch.stack([row @ self.into[layer] for row in hidden])
        heads = self.shape.value_heads
        channels, decay, beta = rows.split((self.shape.channels, heads, heads), -1)
        decay, beta = (torch.stack([how(row) for row in each]) for how, each in ((gate, decay), (torch.sigmoid, beta)))
        return RecurrentInputs(channels.to(self.dtype), decay, beta)

    def added(self, layer, hidden, rows):
        return [row + each.flatten().float() @ self.out[layer] for row, each in zip(hidden, rows, strict=True)]

    def step(self, slot, tokens, start=None, layers=None):
        """Run a step, of all ``layers`` or only that many."""
        hidden = self.embedded(tokens)
        for layer in self.layers[:layers]:
            rows = slot.step(layer, self.weights[layer], self.inputs(layer, hidden), start)
            hidden = self.added(layer, hidden, rows)
        return torch.stack(hidden)

    def chunk(self, slot, tokens, into, layers=None):
        hidden = self.embedded(tokens)
        for layer in self.layers[:layers]:
            rows = slot.chunk(layer, self.weights[layer], self.inputs(layer, hidden), into)
            hidden = self.added(layer, hidden, rows)
        return torch.stack(hidden)


def gate(row):
    return -F.softplus(row)


class PlainLoop:
    """What a stack computes, token by token from the first, without journals. A history is a tuple of its tokens; the
    tokens of a chunk are one tuple in it."""

    def __init__(self, stack):
        self.stack, shape = stack, stack.shape
        self.lanes = stack.slot().lanes
        empty = torch.zeros(3, shape.channels, dtype=stack.dtype)
        state = torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim)
        self.known = {(): ([(state, empty)] * len(stack.layers), torch.zeros(0))}

    def rows(self, history, tokens):
        """The rows of the last ``tokens`` items of ``history``."""
        return torch.cat([self.after(history[: len(history) - back])[1] for back in reversed(range(tokens))])

    def after(self, history):
        """State and last inputs of every layer, and the rows of the last item."""
        if history not in self.known:
            held, _ = self.after(history[:-1])
            tokens = history[-1] if isinstance(history[-1], tuple) else history[-1:]
            token = self._native_token if self.lanes else self._token
            form = self._chunk if isinstance(history[-1], tuple) else token
            hidden, after = self.stack.embedded(tokens), []
            for layer, (last, before) in enumerate(held):
                inputs = self.stack.inputs(layer, hidden)
                window = torch.cat((before, inputs.channels))
                rows, state = form(last, window.float(), self.stack.weights[layer].float(), inputs)
                hidden = self.stack.added(layer, hidden, rows.to(self.stack.dtype))
                after.append((state, window[-3:]))
            self.known[history] = after, torch.stack(hidden)
        return self.known[history]

    @staticmethod
    def _token(state, window, weight, inputs):
        mixed = window[0] * weight[:, 0]
        for tap in (1, 2, 3):
            mixed = mixed + window[tap] * weight[:, tap]
        query, key, value = F.silu(mixed).split((16, 16, 16))
        rule = (
            query.view(1, 1, 2, 8),
            key.view(1, 1, 2, 8),
            value.view(1, 1, 4, 4),
            *(each[None] for each in inputs[1:]),
        )
        options = {"initial_state": state[None], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        from transformers.models.qwen3_next import modeling_qwen3_next  # seconds, which not all who use a loop need

        rows, state = modeling_qwen3_next.torch_recurrent_gated_delta_rule(*rule, **options)
        return rows[0], state[0]

    def _native_token(self, state, window, weight, inputs):
        """The token's row from the state before it; then it is folded, and nothing else."""
        shape, state, channels = self.stack.shape, state.clone(), torch.zeros_like(window).to(self.stack.dtype)
        gates = torch.zeros(len(channels), 2, shape.value_heads)
        channels[1:] = window[:3]
        form, held = (shape, self.lanes, weight.T.contiguous()), [each.data_ptr() for each in (state, channels, gates)]
        rows = native_recurrent.step(*form, np.array([[*held, len(channels), 0, 0, 0, 0, 1]]), inputs)
        native_recurrent.step(*form, np.array([[*held, len(channels), 0, 1, 1, 0, 0]]), inputs)
        return rows, state

    def _chunk(self, state, window, weight, inputs):
        state, shape, weight = state.clone(), self.stack.shape, weight.T.contiguous()
        if self.lanes:
            inputs = inputs._replace(channels=window.to(self.stack.dtype))
            return native_recurrent.chunk(shape, self.lanes, weight, inputs, state), state
        heads = split_heads(convolve(window, weight), shape)
        return delta_chunks(state, heads, *inputs[1:]), state
