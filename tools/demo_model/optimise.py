"""One training run: batches, schedule, optimiser, loss. Knows shapes of tensors, not where the text comes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM

SEGMENT = 1024
"""Text is drawn in pieces of this many ids, then cut to the context of the step: the draw does not depend on it."""


@dataclass(frozen=True)
class Plan:
    """What a run does. It ends after `steps`, or early, with the schedule squeezed to fit, after `minutes`.

    `context` maps the fraction of the run from which a context length holds to that length. From the fraction
    `distil_from` on, the loss is `1 - distil` parts cross-entropy and `distil` parts KL from the teacher.
    """

    steps: int
    minutes: float
    seed: int
    learning_rate: float
    segments: int = 4
    warmup: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.97)
    distil: float = 0.0
    distil_from: float = 0.0
    context: tuple[tuple[float, int], ...] = ((0.0, 256), (0.6, 512), (0.92, 1024))


@dataclass
class Report:
    """What a run did."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    """Cross-entropy on the training text in nats per token, averaged over the last 100 steps."""


def segments(stream: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Batches `[count, SEGMENT + 1]` of one stream of ids: epochs of all segments in random order and phase."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        phase = int(torch.randint(SEGMENT, (1,), generator=generator))
        usable = (len(stream) - phase - 1) // SEGMENT
        order = torch.randperm(usable, generator=generator)
        for row in range(0, usable - count + 1, count):
            starts = (phase + order[row : row + count] * SEGMENT).tolist()
            yield torch.stack([stream[start : start + SEGMENT + 1] for start in starts])


def cut(batch: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets `[rows, context]` of a batch of segments."""
    return batch[:, :-1].reshape(-1, context), batch[:, 1:].reshape(-1, context)


def schedule(progress: float, step: int, warmup: int) -> float:
    """Linear warm-up, then linear decay to zero (Defazio et al. 2023; Bergsma et al. 2025)."""
    return min(1.0, (step + 1) / warmup) * max(0.0, 1.0 - progress)


def optimiser(model: Qwen3ForCausalLM, plan: Plan) -> torch.optim.Optimizer:
    """AdamW; weight decay on the matrices only."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=plan.betas, fused=True)


def train(
    model: Qwen3ForCausalLM,
    stream: Tensor,
    plan: Plan,
    *,
    teacher: Qwen3ForCausalLM | None = None,
    checkpoint: Callable[[Report], None],
    every_minutes: float,
    compiled: bool = True,
) -> Report:
    """Train in place; a teacher is needed only if the plan distils.

    `checkpoint` is called every `every_minutes`. Matrix products run in bfloat16, master weights are float32.
    """

    def loss_of(inputs: Tensor, targets: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        scores = F.log_softmax(logits.float(), -1).flatten(0, 1)
        entropy = F.nll_loss(scores, targets.flatten())
        if taught is None:
            return entropy, entropy
        divergence = F.kl_div(scores, taught.flatten(0, 1), reduction="batchmean", log_target=True)
        return entropy.lerp(divergence, plan.distil), entropy

    def teach(inputs: Tensor) -> Tensor:
        assert teacher is not None
        return F.log_softmax(teacher(input_ids=inputs, use_cache=False).logits.float(), -1)

    forward = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    lesson = torch.compile(teach, dynamic=False) if compiled else teach
    rule = optimiser(model, plan)
    report = Report()
    recent: list[float] = []
    started = saved = time.monotonic()
    model.train()
    for step, batch in enumerate(segments(stream, plan.segments, plan.seed)):
        progress = max(step / plan.steps, (time.monotonic() - started) / (60 * plan.minutes))
        if progress >= 1:
            break
        context = [length for start, length in plan.context if progress >= start][-1]
        inputs, targets = cut(batch, context)
        taught = None
        if teacher is not None and progress >= plan.distil_from:
            with torch.no_grad():
                taught = lesson(inputs)
        loss, entropy = forward(inputs, targets, taught)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in rule.param_groups:
            group["lr"] = plan.learning_rate * schedule(progress, step, plan.warmup)
        rule.step()
        rule.zero_grad()
        recent = [*recent[-99:], float(entropy.detach())]
        now = time.monotonic()
        report = Report(step + 1, (step + 1) * targets.numel(), now - started, sum(recent) / len(recent))
        if step % 50 == 0:
            rate = report.tokens / report.seconds
            print(f"step {step} context {context} loss {report.loss:.4f} {rate:.0f} ids/s", flush=True)
        if now - saved > 60 * every_minutes:
            checkpoint(report)
            saved = time.monotonic()
    model.train(False)
    return report
