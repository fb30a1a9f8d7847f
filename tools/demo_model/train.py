"""Make the two demo models: `python -m tools.demo_model.train`.

Fetches the text, trains the target, trains the draft on the same text and then on the target's distribution, measures
both on held-out chapters, and writes the weights into the folders of the committed assets, whose shape they have. The
figures that it prints belong into the model cards.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo_model.corpus import load

ASSETS: Final = Path(__file__).resolve().parents[2] / "ferrum_rpc_demo"
FOLDERS: Final = {"target": "demo", "draft": "demo-draft"}
END_OF_TEXT: Final = 256
"""Stands between documents: beginning and end of sequence at once. The other ids are bytes."""

SEGMENT: Final = 1024
"""Text is drawn in pieces of this many ids, then cut to the context of the step: the draw does not depend on it."""

SEGMENTS: Final = 4
CONTEXTS: Final = ((0.0, 256), (0.6, 512), (0.92, 1024))
"""Fractions of the run from which a context length holds."""

WARM_UP: Final = 100
BETAS: Final = (0.9, 0.97)
WEIGHT_DECAY: Final = 0.1
HELD_CONTEXT: Final = 512


@dataclass(frozen=True)
class Recipe:
    """One role; the command line overrides the steps. From the fraction ``distil_from`` of the run on, the loss
    is ``1 - distil`` parts cross-entropy and ``distil`` parts KL from the teacher."""

    steps: int
    learning_rate: float
    distil: float = 0.0
    distil_from: float = 0.0


RECIPES: Final = {
    "target": Recipe(steps=1141, learning_rate=3e-3),
    "draft": Recipe(steps=957, learning_rate=4e-3, distil=0.7, distil_from=0.7),
}


# --- a model in and out of a folder -----------------------------------------------------------------------------------


def build(folder: Path) -> Qwen3ForCausalLM:
    """A freshly initialised float32 model; the projections into the residual stream start smaller (GPT-2's rule)."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(Qwen3Config(**(config | {"torch_dtype": "float32"})))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.div_((2 * config["num_hidden_layers"]) ** 0.5)
    return model


def stored(folder: Path) -> Qwen3ForCausalLM:
    """The model of a folder, in the bfloat16 it is stored in, ready to evaluate."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.train(False)
    return model


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Replace the weights whole, so that an interruption leaves old ones."""
    state = model.state_dict()
    state.pop("lm_head.weight")  # tied to model.embed_tokens.weight
    scratch = folder / "model.safetensors.part"
    save_file({name: t.to(torch.bfloat16).contiguous() for name, t in state.items()}, scratch, {"format": "pt"})
    scratch.chmod(0o644)  # the library creates it for its owner alone
    scratch.replace(folder / "model.safetensors")


# --- training ---------------------------------------------------------------------------------------------------------


def stream(documents: Sequence[str]) -> Tensor:
    """Documents as one int64 vector of ids, each after an end-of-text id."""
    ids = [each for document in documents for each in (END_OF_TEXT, *document.encode("ascii"))]
    return torch.tensor(ids, dtype=torch.int64)


def segments(ids: Tensor, seed: int) -> Iterator[Tensor]:
    """Batches ``[SEGMENTS, SEGMENT + 1]`` of one stream of ids: epochs of all segments in random order and phase."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        phase = int(torch.randint(SEGMENT, (1,), generator=generator))
        usable = (len(ids) - phase - 1) // SEGMENT
        order = torch.randperm(usable, generator=generator)
        for row in range(0, usable - SEGMENTS + 1, SEGMENTS):
            starts = (phase + order[row : row + SEGMENTS] * SEGMENT).tolist()
            yield torch.stack([ids[start : start + SEGMENT + 1] for start in starts])


def optimiser(model: Qwen3ForCausalLM, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW; weight decay on the matrices only."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


def train(args: argparse.Namespace, recipe: Recipe, model: Qwen3ForCausalLM, ids: Tensor) -> float:
    """Train in place. Matrix products run in bfloat16, master weights are float32. Linear warm-up, then linear decay to
    zero (Defazio et al. 2023; Bergsma et al. 2025)."""

    def loss_of(inputs: Tensor, targets: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        scores = F.log_softmax(logits.float(), -1).flatten(0, 1)
        entropy = F.nll_loss(scores, targets.flatten())
        if taught is None:
            return entropy, entropy
        divergence = F.kl_div(scores, taught.flatten(0, 1), reduction="batchmean", log_target=True)
        return entropy.lerp(divergence, recipe.distil), entropy

    def teach(inputs: Tensor) -> Tensor:
        return F.log_softmax(teacher(input_ids=inputs, use_cache=False).logits.float(), -1)

    teacher: Any = stored(args.out / FOLDERS["target"]) if recipe.distil else None
    forward = loss_of if args.eager else torch.compile(loss_of, dynamic=False)
    lesson = teach if args.eager else torch.compile(teach, dynamic=False)
    rule = optimiser(model, recipe.learning_rate)
    recent: list[float] = []
    model.train()
    for step, batch in zip(range(recipe.steps), segments(ids, args.seed), strict=False):
        progress = step / recipe.steps
        context = [length for start, length in CONTEXTS if progress >= start][-1]
        inputs, targets = batch[:, :-1].reshape(-1, context), batch[:, 1:].reshape(-1, context)
        taught = None
        if teacher is not None and progress >= recipe.distil_from:
            with torch.no_grad():
                taught = lesson(inputs)
        loss, entropy = forward(inputs, targets, taught)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in rule.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (step + 1) / WARM_UP) * max(0.0, 1.0 - progress)
        rule.step()
        rule.zero_grad()
        recent = [*recent[-99:], float(entropy.detach())]
        if step % 50 == 0:
            print(f"step {step} context {context} loss {sum(recent) / len(recent):.4f}", flush=True)
    model.train(False)
    return sum(recent) / len(recent)


# --- what it is worth -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def held_out(model: Qwen3ForCausalLM, ids: Tensor, rows: int = 16) -> tuple[float, Tensor]:
    """Loss in nats per byte and the most likely next id at every position. The weights are used in their own dtype."""
    usable = (len(ids) - 1) // HELD_CONTEXT * HELD_CONTEXT
    inputs, targets = ids[:usable].view(-1, HELD_CONTEXT), ids[1 : usable + 1].view(-1, HELD_CONTEXT)
    total, choices = 0.0, []
    for row in range(0, len(inputs), rows):
        logits = model(input_ids=inputs[row : row + rows], use_cache=False).logits.float()
        correct = targets[row : row + rows].flatten()
        total += float(F.cross_entropy(logits.flatten(0, 1), correct, reduction="sum"))
        choices.append(logits.argmax(-1).flatten())
    return total / usable, torch.cat(choices)


def measured(args: argparse.Namespace, role: str, valid: Tensor) -> str:
    """What the stored model is worth on held-out text."""
    nats, choices = held_out(stored(args.out / FOLDERS[role]), valid)
    found = f"{nats:.3f} nats/byte, {nats / log(2):.3f} bits/byte held out (context {HELD_CONTEXT})"
    if role == "draft":
        target = held_out(stored(args.out / FOLDERS["target"]), valid)[1]
        found += f"; greedy acceptance {float((choices == target).double().mean()):.1%}"
    return found


# --- the program ------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--role", choices=["target", "draft", "both"], default="both")
    parser.add_argument("--out", type=Path, default=ASSETS, help="where demo/ and demo-draft/ are")
    parser.add_argument("--cache", type=Path, default=Path("build/demo-text"), help="where packages are unpacked")
    parser.add_argument("--steps", type=int, help="steps of 4,096 bytes (default: 1141 target, 957 draft)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--eager", action="store_true", help="no torch.compile (needs no C++ compiler; slower)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Make what the command line asks for."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    text = load(args.cache)
    print("bytes for training and held out:", *(sum(map(len, each)) for each in (text.train, text.valid)))
    print("packages:", text.versions)
    for role, recipe in RECIPES.items():
        if args.role in (role, "both"):
            folder: Path = args.out / FOLDERS[role]
            torch.manual_seed(args.seed)
            model = build(folder)
            loss = train(args, replace(recipe, steps=args.steps or recipe.steps), model, stream(text.train))
            save(model, folder)
            print(f"{role}: {loss:.3f} nats/byte in training, {measured(args, role, stream(text.valid))}")


if __name__ == "__main__":
    main()
