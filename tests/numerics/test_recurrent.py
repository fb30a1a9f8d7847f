"""The state of a recurrent layer, one journal behind: what gives the very bits of a plain loop, and what is only close.

In float64 the oracle is transformers. Its functions compute in float32 whatever they get; `in_double` changes that. In
float32 a plain loop over the tokens of a sequence is the oracle, with the rule of transformers for each token, or the C
kernel's for a lone one. It has no journal, and computes from the first token what a sequence contains now.

Equal bits: steps of any split of the same tokens, truncation within the last step, failed and repeated steps, steps
under way at once, forks, images, and roll-back to the checkpoint before a chunk. A chunk has the bits of a chunk of the
same tokens from the same state; to the values of the token-by-token form it is only close.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from ferrum_rpc.attention import native_recurrent
from ferrum_rpc.attention.recurrent import (
    STEP_TOKENS,
    RecurrentInputs,
    RecurrentSlot,
    SlotImage,
    convolve,
    delta_chunks,
    delta_read,
    delta_update,
    rows_needed,
    split_heads,
)
from ferrum_rpc.attention.recurrent_steps import RecurrentSpan, RecurrentStep, RecurrentStore, slot_bytes
from ferrum_rpc.core import RecurrentShape
from tests.support.harness import TorchInDouble
from tests.support.poison import fill_journal
from tests.support.recurrent_layers import (
    SHAPE,
    VOCABULARY,
    PlainLoop,
    Stack,
    after_chunk,
    close,
    everything,
    new_slot,
    random,
)

FAMILIES = {"qwen3_next": ("Qwen3Next", "Config"), "qwen3_5": ("Qwen3_5", "TextConfig")}
"""How transformers calls their classes."""

QWEN_08B = RecurrentShape(key_heads=16, value_heads=16, key_dim=128, value_dim=128)
"""Each of the 18 recurrent layers of Qwen3.5-0.8B."""


def from_image(image, rows):
    slot = new_slot(rows, len(image.folded), dtype=image.channels.dtype)
    slot.load(image)
    return slot


# --- against transformers, in float64 ---------------------------------------------------------------------------------


def modeling_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.fixture(params=FAMILIES)
def modeling(request, monkeypatch):
    """A family's module of transformers, which computes in float64 what it would in float32."""
    module = modeling_of(request.param)
    monkeypatch.setattr(module, "torch", TorchInDouble())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return module


def random_rule(tokens, key_heads, seed):
    """State, q, k, v, log decay and beta of 4 heads, as a layer may have them."""
    heads = SHAPE.value_heads
    state = random(heads, 8, 4, seed=seed, dtype=torch.float64)
    query, key = random(2, tokens, key_heads, 8, seed=seed + 1, dtype=torch.float64)
    value = random(tokens, heads, 4, seed=seed + 2, dtype=torch.float64)
    decay, beta = random(2, tokens, heads, seed=seed + 3, dtype=torch.float64)
    return state, query, key, value, -F.softplus(decay), beta.sigmoid()


def heads_of(query, key, value):
    shape = RecurrentShape(query.shape[1], value.shape[1], query.shape[2], value.shape[2])
    return split_heads(torch.cat([each.flatten(1) for each in (query, key, value)], 1), shape)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_token_by_token_form_is_that_of_transformers(modeling, tokens, key_heads):
    state, *rows, decay, beta = random_rule(tokens, key_heads, seed=tokens)
    rule = [each[None] for each in (*rows, decay, beta)]
    options = {"initial_state": state[None], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    wanted, last = modeling.torch_recurrent_gated_delta_rule(*rule, **options)
    heads, found = heads_of(*rows), []
    for token in range(tokens):
        delta_update(state, heads.key[token], heads.value[token], decay[token], beta[token])
        found.append(delta_read(state, heads.query[token]))
    assert close(torch.stack(found), wanted[0]) and close(state, last[0])


@pytest.mark.parametrize("tokens", [1, 33, 64, 65, 130])
def test_the_chunked_form_is_that_of_transformers(modeling, tokens):
    state, *rows, decay, beta = random_rule(tokens, 2, seed=tokens)
    rule = [each[None] for each in (*rows, decay, beta)]
    options = {"initial_state": state[None], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    wanted, last = modeling.torch_chunk_gated_delta_rule(*rule, **options)
    found = delta_chunks(state, heads_of(*rows), decay, beta)
    assert close(found, wanted[0]) and close(state, last[0])


def test_a_decay_of_nearly_everything_leaves_no_infinities():
    """The logarithm of a chunk's decay reaches thousands in models; its inverse is no float."""
    state, *rows, decay, beta = random_rule(64, 2, seed=7)
    heads, decay, plain = heads_of(*rows), decay - 40, state.clone()
    found, wanted = delta_chunks(state, heads, decay, beta), []
    for token in range(64):
        delta_update(plain, heads.key[token], heads.value[token], decay[token], beta[token])
        wanted.append(delta_read(plain, heads.query[token]))
    assert close(found, torch.stack(wanted)) and close(state, plain)


def test_the_convolution_is_that_of_transformers(modeling):
    inputs, weight = random(12, 6, dtype=torch.float64), random(6, 4, seed=1, dtype=torch.float64)
    padded, taps = torch.cat((torch.zeros(3, 6, dtype=torch.float64), inputs)), weight.T
    whole = modeling.causal_conv1d_fn(inputs.T[None], weight, None, "silu")[0].T
    assert close(convolve(padded, taps), whole)
    state = torch.zeros(1, 6, 4, dtype=torch.float64)
    for token in range(12):
        row = modeling.causal_conv1d_update(inputs[token][None, :, None], state, weight, None, "silu")[0, :, 0]
        assert close(convolve(padded[token : token + 4], taps)[0], row)


@dataclass
class Layer:
    """A Gated DeltaNet layer of transformers whose recurrence and convolution run over a slot."""

    module: torch.nn.Module

    @property
    def weight(self):
        return self.module.conv1d.weight.squeeze(1)

    def rows(self, slot, hidden, into=None):
        """Of a step, or of a chunk whose state goes ``into`` another slot."""
        inputs, gate = self._projected(hidden)
        form = (slot.step,) if into is None else (slot.chunk, into)
        rows = form[0](0, self.weight, inputs, *form[1:])
        normed = self.module.norm(rows.reshape(-1, rows.shape[-1]), gate.reshape(-1, gate.shape[-1]))
        return self.module.out_proj(normed.reshape(len(hidden), -1))

    def _projected(self, hidden):
        made, rows = self.module, hidden[None]
        if hasattr(made, "in_proj_qkvz"):
            *qkv, gate, b, a = made.fix_query_key_value_ordering(made.in_proj_qkvz(rows), made.in_proj_ba(rows))
            channels = torch.cat([each.flatten(2) for each in qkv], -1)
        else:
            channels, gate, b, a = (getattr(made, f"in_proj_{each}")(rows) for each in ("qkv", "z", "b", "a"))
            gate = gate.unflatten(-1, (made.num_v_heads, -1))
        decay = -made.A_log.float().exp() * F.softplus(a.float() + made.dt_bias)
        return RecurrentInputs(channels[0], decay[0], b.sigmoid()[0]), gate[0]


def layer_of(modeling, dtype):
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    options = {"hidden_size": 24, "num_hidden_layers": 4, "linear_value_head_dim": 4, **sizes}
    name, suffix = FAMILIES[modeling.__name__.rpartition("modeling_")[2]]
    config, made = getattr(modeling, name + suffix)(**options), getattr(modeling, f"{name}GatedDeltaNet")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return config, made(config, 0).to(dtype).requires_grad_(False)


def fed_with_every_operation(layer, hidden, dtype):
    """Rows of a chunk of 70, single tokens, drafts of which some are rejected, a failed step and one of 32 tokens."""
    slot = new_slot(rows_needed(SHAPE, 5, 32), dtype=dtype)
    after = after_chunk(slot, 70)
    rows, slot = [layer.rows(slot, hidden[:70], into=after)], after
    while slot.length < 78:
        rows.append(layer.rows(slot, hidden[slot.length][None]))
        slot.commit(1)
    for kept in (0, 1, 3, 5):
        start = slot.length
        drafts = torch.cat((hidden[start : start + kept], hidden[kept:5].flip(0)))
        rows.append(layer.rows(slot, drafts)[:kept])
        slot.commit(5)
        slot.truncate(start + kept)
    layer.rows(slot, hidden[:3])
    rows.append(layer.rows(slot, hidden[87:119]))
    slot.commit(32)
    return torch.cat(rows)


def test_a_layer_is_that_of_transformers(modeling):
    _, module = layer_of(modeling, torch.float64)
    hidden = random(119, 24, dtype=torch.float64)
    found = fed_with_every_operation(Layer(module), hidden, torch.float64)
    assert close(found, module(hidden[None])[0])


def test_a_layer_decodes_as_transformers_does_over_its_own_cache(modeling):
    from transformers import DynamicCache

    config, module = layer_of(modeling, torch.float64)
    hidden, cache, layer = random(45, 24, dtype=torch.float64), DynamicCache(config=config), Layer(module)
    empty = new_slot(rows_needed(SHAPE, 1, 1), dtype=torch.float64)
    slot = after_chunk(empty, 40)
    assert close(layer.rows(empty, hidden[:40], into=slot), module(hidden[None, :40], cache)[0])
    for each in hidden[40:]:
        assert close(layer.rows(slot, each[None]), module(each[None, None], cache)[0])
        slot.commit(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_in_float32_is_as_near_as_rounding_allows(family):
    _, module = layer_of(modeling_of(family), torch.float32)
    hidden = random(119, 24)
    assert close(fed_with_every_operation(Layer(module), hidden, torch.float32), module(hidden[None])[0], 1e-5)


# --- a stack of layers, in torch and by the kernel --------------------------------------------------------------------


def compute_in(form, monkeypatch):
    """Slots that are made from now on compute in ``torch``, or by the ``native`` kernel."""
    if form == "torch":
        monkeypatch.setattr(native_recurrent, "lanes_of", lambda *_: 0)
    elif not new_slot(5).lanes:
        pytest.skip("the library is not built")


@pytest.fixture(params=["torch", "native"])
def form(request, monkeypatch):
    compute_in(request.param, monkeypatch)
    return request.param


in_both_forms = pytest.mark.usefixtures("form")


def carried(slot, rows):
    """``slot`` as an executor that imports it gets it: from bytes."""

    def moved(tensor):
        return torch.frombuffer(bytearray(tensor.view(torch.uint8).numpy().tobytes()), dtype=tensor.dtype).view(
            tensor.shape
        )

    image = slot.image()
    arrived = replace(image, **{name: moved(getattr(image, name)) for name in ("states", "channels", "gates")})
    return from_image(arrived, max(rows, image.channels.shape[1]))


class Broken(RuntimeError):
    pass


class BreaksAt(TorchDispatchMode):
    """The operation of torch with this number fails, before it does anything."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise Broken
        return func(*args, **(kwargs or {}))


# --- any history ------------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """A sequence: its slot, what it contains, and how far it can be truncated within its last step. So is a checkpoint,
    whose slot may be an image."""

    slot: RecurrentSlot | SlotImage
    history: tuple = ()
    free: int = 0
    checkpoint: Life | None = None


def cut(history, length):
    """The first ``length`` tokens, all behind the last chunk."""
    while sum(len(item) if isinstance(item, tuple) else 1 for item in history) > length:
        assert not isinstance(history[-1], tuple)
        history = history[:-1]
    return history


few = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5).map(tuple)
many = st.tuples(st.integers(0, VOCABULARY - 1), st.integers(STEP_TOKENS + 1, 70)).map(
    lambda each: tuple((each[0] + place * place) % VOCABULARY for place in range(each[1]))
)
thens = st.sampled_from(["", "again", "truncate", "truncate again"])
sizes = st.integers(rows_needed(SHAPE, 5, 5 + 5), 24)
kinds = st.sampled_from([(1, torch.float32), (3, torch.float32), (2, torch.bfloat16)])
"""Numbers of layers, and their type."""


class Histories(RuleBasedStateMachine):
    """Steps are of at most 5 tokens, two of them under way at once at most."""

    @initialize(kind=kinds, steps=st.lists(few, min_size=2, max_size=3))
    def begin(self, kind, steps):
        self.stack = Stack(*kind)
        self.plain = PlainLoop(self.stack)
        self.lives = [Life(self.stack.slot())]
        for tokens in steps:
            self.take(self.lives[0], tokens, self.stack.step(self.lives[0].slot, tokens))

    def life(self, data):
        return data.draw(st.sampled_from(self.lives), label="sequence")

    def take(self, life, tokens, rows):
        """A step of ``tokens`` is committed, whose rows were ``rows``."""
        life.free, life.history = life.slot.length, life.history + tokens
        life.slot.commit(len(tokens))
        assert torch.equal(rows, self.plain.rows(life.history, len(tokens)))

    @rule(data=st.data(), tokens=few)
    def step(self, data, tokens):
        life = self.life(data)
        self.take(life, tokens, self.stack.step(life.slot, tokens))

    @rule(data=st.data())
    def truncate(self, data):
        self.cut_back(data, self.life(data))

    def cut_back(self, data, life):
        """To any length within the last step, or to another, if the slot still can."""
        within, folded = st.integers(life.free, life.slot.length), st.integers(min(life.slot.folded), life.slot.length)
        length = data.draw(within | within | folded | st.integers(0, life.slot.length), label="length")
        try:
            life.slot.truncate(length)
        except ValueError:
            assert length < life.free
        else:
            life.history, life.free = cut(life.history, length), min(life.free, length)

    @rule(data=st.data(), tokens=few)
    def verify(self, data, tokens):
        life = self.life(data)
        self.take(life, tokens, self.stack.step(life.slot, tokens))
        self.cut_back(data, life)

    @rule(data=st.data(), tokens=few, layers=st.integers(1, 3), then=thens)
    def fail_behind_a_layer(self, data, tokens, layers, then):
        life = self.life(data)
        self.stack.step(life.slot, tokens, layers=layers)
        self.go_on(data, life, tokens, then)

    @rule(data=st.data(), tokens=few, at=st.floats(0, 1), then=thens)
    def fail_at_an_operation(self, data, tokens, at, then):
        life = self.life(data)
        life.slot = self.copy(life.slot)  # a copy of which uses as many rows
        copy, counter = self.copy(life.slot), BreaksAt(-1)
        with counter:
            self.stack.step(copy, tokens)
        operations = -1 - counter.left
        with pytest.raises(Broken), BreaksAt(int(at * (operations - 1))):
            self.stack.step(life.slot, tokens)
        self.go_on(data, life, tokens, then)

    def go_on(self, data, life, tokens, then):
        if "truncate" in then:
            self.cut_back(data, life)
        if "again" in then:
            self.take(life, tokens, self.stack.step(life.slot, tokens))

    @rule(data=st.data(), tokens=few, after=few, committed=st.sampled_from([0, 1, 2]))
    def two_under_way(self, data, tokens, after, committed):
        """The second step begins before the first is committed, and may be lost with it or without it."""
        life = self.life(data)
        first = self.stack.step(life.slot, tokens)
        start = life.slot.length + len(tokens)
        second = self.stack.step(life.slot, after, start)
        for each, rows in list(zip((tokens, after), (first, second), strict=True))[:committed]:
            self.take(life, each, rows)

    @rule(data=st.data(), tokens=many, layers=st.none() | st.integers(0, 3))
    def chunk(self, data, tokens, layers):
        """In all layers, or it fails behind some."""
        life = self.life(data)
        into = after_chunk(life.slot, len(tokens))
        if layers is not None:
            if layers:
                self.stack.chunk(life.slot, tokens, into, layers)
            return
        rows = self.stack.chunk(life.slot, tokens, into)
        life.checkpoint = replace(life)
        life.slot, life.history, life.free = into, (*life.history, tokens), into.length
        assert torch.equal(rows, self.plain.rows(life.history, 1))

    @rule(data=st.data())
    def keep_a_checkpoint(self, data):
        life = self.life(data)
        life.checkpoint = replace(life, slot=life.slot.image())

    @precondition(lambda self: any(life.checkpoint for life in self.lives))
    @rule(data=st.data())
    def roll_back_to_a_checkpoint(self, data):
        """To one that was kept, or to the slot before a chunk."""
        life = data.draw(st.sampled_from([each for each in self.lives if each.checkpoint]), label="sequence")
        before = life.checkpoint
        if isinstance(before.slot, SlotImage):
            before = replace(before, slot=from_image(before.slot, 18))
        self.lives[self.lives.index(life)] = before

    @precondition(lambda self: len(self.lives) < 4)
    @rule(data=st.data(), rows=sizes)
    def fork(self, data, rows):
        life = self.life(data)
        self.lives.append(replace(life, slot=self.copy(life.slot, rows), checkpoint=None))

    @staticmethod
    def copy(slot, rows=0):
        return from_image(slot.image(), rows or slot.channels.shape[1])

    @rule(data=st.data(), rows=sizes)
    def export_and_import(self, data, rows):
        life = self.life(data)
        life.slot = carried(life.slot, rows)

    @rule(data=st.data())
    def poison(self, data):
        fill_journal(self.life(data).slot)

    def teardown(self):
        for life in getattr(self, "lives", ()):
            assert torch.equal(self.stack.step(life.slot, (1, 2)), self.plain.rows((*life.history, 1, 2), 2))


def with_every_history(form):
    """A test case of pytest."""

    class Case(Histories.TestCase):
        settings = settings(max_examples=40, stateful_step_count=20, suppress_health_check=list(HealthCheck))

        def setUp(self):
            patch = pytest.MonkeyPatch()
            self.addCleanup(patch.undo)
            compute_in(form, patch)

    return Case


TestHistories = with_every_history("torch")
TestNativeHistories = with_every_history("native")


# --- promises, one by one ---------------------------------------------------------------------------------------------

BEGUN, LAST = (1, 2), (4, 5, 6)


def after_two_steps(stack):
    slot = stack.slot()
    for tokens in (BEGUN, LAST):
        stack.step(slot, tokens)
        slot.commit(len(tokens))
    return fill_journal(slot)


def test_whatever_operation_fails_every_truncation_within_the_last_step_is_still_free(form):
    stack, new = Stack(2), (6,)
    plain, image = PlainLoop(stack), after_two_steps(stack).image()
    for operation in range(1000):
        slot = from_image(image, 24)
        try:
            with BreaksAt(operation):
                stack.step(slot, new)
            break
        except Broken:
            assert (slot.length, slot.floor) == (5, 2)
        kept = 2 + operation % 4
        slot.truncate(kept)
        assert torch.equal(stack.step(slot, new), plain.rows((*(BEGUN + LAST)[:kept], *new), 1)), (operation, kept)
    assert (200 if form == "torch" else 9) < operation < 999


@in_both_forms
@pytest.mark.parametrize("split", [[1] * 32, [32], [5, 1, 1, 25], [31, 1]], ids=str)
def test_rows_have_the_same_bits_however_tokens_are_divided_into_steps(split):
    stack, tokens = Stack(1), tuple(place * place % VOCABULARY for place in range(32))
    slot, rows = stack.slot(rows_needed(SHAPE, 32, 32)), []
    for count in split:
        rows.append(stack.step(slot, tokens[slot.length : slot.length + count]))
        slot.commit(count)
    assert torch.equal(torch.cat(rows), PlainLoop(stack).rows(tokens, 32))


@in_both_forms
def test_a_chunk_is_close_to_the_steps_of_its_tokens_and_not_the_same():
    stack, tokens = Stack(1), tuple(place * place % VOCABULARY for place in range(70))
    slot = stack.slot()
    found = stack.chunk(slot, tokens, after_chunk(slot, 70))
    wanted = PlainLoop(stack).rows(tokens, 70)
    assert close(found, wanted, 1e-5) and not torch.equal(found, wanted)


def inputs_of(stack, count):
    tokens = tuple(place * place % VOCABULARY for place in range(count))
    return stack.inputs(0, stack.embedded(tokens))


@in_both_forms
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=str)
def test_a_step_of_several_sequences_gives_each_the_rows_of_a_step_of_its_own(order):
    """A prompt, a decode, drafts, and the longest step of a sequence that begins."""
    stack, counts, begun = Stack(1), [70, 1, 5, 32], [LAST, LAST, (), ()]
    weight, slots, wanted, after = stack.weights[0], [], [], []
    for index in order:
        own, shared = (stack.slot(rows_needed(SHAPE, 5, 32)) for _ in range(2))
        for slot in (own, shared):
            if begun[index]:
                stack.step(slot, begun[index])
                slot.commit(len(begun[index]))
        slots.append(shared)
        inputs, later = inputs_of(stack, counts[index]), own
        if counts[index] > STEP_TOKENS:
            later = after_chunk(own, counts[index])
            wanted.append(own.chunk(0, weight, inputs, later))
        else:
            wanted.append(own.step(0, weight, inputs))
            later.commit(counts[index])
        after.append(later)
    packed = [torch.cat(each) for each in zip(*(inputs_of(stack, counts[index]) for index in order), strict=True)]
    spans = []
    for index, slot in zip(order, slots, strict=True):
        into = slot if counts[index] <= STEP_TOKENS else stack.slot()
        spans.append(RecurrentSpan(slot, into, len(begun[index]), counts[index]))
    step = RecurrentStep(spans)
    assert torch.equal(step.recur(0, weight, *packed), torch.cat(wanted))
    assert [slot.length for slot in slots] == [len(begun[index]) for index in order]
    step.commit()
    assert [everything(span.into) for span in spans] == [everything(slot) for slot in after]


def test_a_truncation_computes_nothing():
    slot = after_two_steps(Stack(2))
    for length in (4, 2):
        with BreaksAt(0):
            slot.truncate(length)
    assert slot.length == 2


@in_both_forms
def test_a_step_folds_no_token_that_a_truncation_can_remove_and_every_other():
    stack = Stack(2)
    slot = after_two_steps(stack)
    assert slot.folded == [0, 0]
    stack.step(slot, (1,), layers=1)
    assert slot.folded == [2, 0]
    stack.step(slot, (1,))
    slot.commit(1)
    assert (slot.folded, slot.floor, slot.length) == ([2, 2], 5, 6)


@in_both_forms
def test_a_sequence_can_be_cut_to_nothing_and_begin_again():
    stack = Stack(1)
    slot = stack.slot()
    stack.step(slot, LAST)
    slot.commit(3)
    slot.truncate(0)
    assert torch.equal(stack.step(fill_journal(slot), BEGUN), PlainLoop(stack).rows(BEGUN, 2))


def test_a_sequence_that_decodes_holds_less_than_a_tenth_more_than_its_states():
    def held(dtype, last, new):
        rows, device = rows_needed(QWEN_08B, last, new), torch.device("meta")
        return sum(
            each.nbytes for each in RecurrentStore(QWEN_08B, 18, 1, rows=rows, dtype=dtype, device=device).buffers
        )

    states = 18 << 20
    assert slot_bytes(QWEN_08B, 18, torch.bfloat16)[0] == states
    assert held(torch.bfloat16, 1, 1) <= 1.06 * states
    convolution = 3 * 18 * QWEN_08B.channels * 4  # a state as any engine holds it has these, too
    assert held(torch.float32, 1, 1) <= 1.05 * (states + convolution)
    assert held(torch.bfloat16, 5, 5) <= 1.16 * states
    assert held(torch.bfloat16, 32, 32) == sum(slot_bytes(QWEN_08B, 18, torch.bfloat16)) <= 1.8 * states


@in_both_forms
def test_five_rows_are_enough_to_decode():
    """Four are refused: see below."""
    stack = Stack(2)
    plain, slot = PlainLoop(stack), stack.slot(rows_needed(SHAPE, 1, 1))
    assert slot.channels.shape[1] == 5
    for token in range(9):
        rows = stack.step(slot, (token % VOCABULARY,))
        slot.commit(1)
        assert torch.equal(rows, plain.rows(tuple(each % VOCABULARY for each in range(token + 1)), 1))
        fill_journal(slot)


@in_both_forms
@pytest.mark.parametrize("case", ["no tokens", "33 tokens", "before the end", "no rows", "heads", "weight"])
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(case):
    stack = Stack(1)
    slot = stack.slot(60 if case != "no rows" else rows_needed(SHAPE, 3, 4))
    for _ in range(2):
        stack.step(slot, LAST)
        slot.commit(3)
    before, start, weight = everything(slot), None, stack.weights[0]
    tokens = {"no tokens": 0, "33 tokens": 33, "no rows": 5}.get(case, 1)
    inputs = RecurrentInputs(random(tokens, SHAPE.channels), random(tokens, 4), random(tokens, 4))
    if case == "before the end":
        start = 5
    if case == "heads":
        inputs = inputs._replace(beta=random(1, 3))
    if case == "weight":
        weight = weight.T
    with pytest.raises(ValueError, match=r"must|needs"):
        slot.step(0, weight, inputs, start)
    assert everything(slot) == before


def test_a_chunk_of_another_length_and_an_image_without_place_are_refused():
    stack = Stack(1)
    slot = after_two_steps(stack)
    with pytest.raises(ValueError, match="longer by the tokens"):
        stack.chunk(slot, (1,) * 40, after_chunk(slot, 41))
    with pytest.raises(ValueError, match="7 rows, and 8 are needed"):
        from_image(slot.image(), 7)
    for length in (-1, 6):
        with pytest.raises(ValueError, match="needs a checkpoint"):
            slot.truncate(length)
