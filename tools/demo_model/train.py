"""Make the two demo models: `python -m tools.demo_model.train`.

Fetches the text, trains the target, trains the draft on the same text and then on the target's distribution, measures
both on held-out chapters, and writes weights and model cards. Shape, tokenizer and the prose of the card are those of
the committed assets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo_model.corpus import Corpus, load, split_words

ASSETS: Final = Path(__file__).resolve().parents[2] / "ferrum_rpc_demo"
FOLDERS: Final = {"target": "demo", "draft": "demo-draft"}
GIVEN: Final = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md")
"""Files of a model's folder that a run does not make; of the card it replaces the figures."""

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
PROMPTS: Final = ("It was a fine morning, and ", "She looked at him ", "And the king said unto ", '"My dear Watson,')


@dataclass(frozen=True)
class Recipe:
    """One role; the command line overrides steps and minutes. From the fraction ``distil_from`` of the run on, the loss
    is ``1 - distil`` parts cross-entropy and ``distil`` parts KL from the teacher."""

    steps: int
    minutes: float
    learning_rate: float
    distil: float = 0.0
    distil_from: float = 0.0


RECIPES: Final = {
    "target": Recipe(steps=6000, minutes=30, learning_rate=3e-3),
    "draft": Recipe(steps=4000, minutes=10, learning_rate=4e-3, distil=0.7, distil_from=0.7),
}


@dataclass
class Report:
    """What a run did. ``loss``: cross-entropy on the training text in nats per id, averaged over the last 100 steps."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")


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


def train(args: argparse.Namespace, recipe: Recipe, model: Qwen3ForCausalLM, ids: Tensor) -> Report:
    """Train in place. The run ends after its steps, or early, with the schedule squeezed to fit, after its minutes.
    Matrix products run in bfloat16, master weights are float32. Linear warm-up, then linear decay to zero (Defazio et
    al. 2023; Bergsma et al. 2025)."""

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
    report = Report()
    recent: list[float] = []
    started = time.monotonic()
    model.train()
    for step, batch in enumerate(segments(ids, args.seed)):
        progress = max(step / recipe.steps, (time.monotonic() - started) / (60 * recipe.minutes))
        if progress >= 1:
            break
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
        now = time.monotonic()
        report = Report(step + 1, (step + 1) * targets.numel(), now - started, sum(recent) / len(recent))
        if step % 50 == 0:
            rate = report.tokens / report.seconds
            print(f"step {step} context {context} loss {report.loss:.4f} {rate:.0f} ids/s", flush=True)
    model.train(False)
    return report


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


@torch.inference_mode()
def sample(model: Any, prompt: str, new: int, temperature: float) -> str:
    """Continue ``prompt`` by up to ``new`` bytes; temperature 0 is greedy. The prompt is part of the answer."""
    torch.manual_seed(0)
    choice: dict[str, Any] = {"do_sample": False, "temperature": None}
    if temperature:
        choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ids = torch.tensor([list(prompt.encode())])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **choice)
    return bytes(int(i) for i in out[0] if i < 256).decode("utf-8", "replace")


def spelled(texts: Sequence[str], known: set[str]) -> float:
    """The share of generated words that are in ``known``; prompts and last words, perhaps cut, do not count."""
    pairs = zip(texts, PROMPTS, strict=True)
    words = [word for text, prompt in pairs for word in split_words(text.removeprefix(prompt))[:-1]]
    return sum(word in known for word in words) / max(1, len(words))


def describe(recipe: Recipe) -> str:
    """The optimiser in words."""
    rule = (
        f"AdamW {recipe.learning_rate:g}, betas {BETAS[0]} and {BETAS[1]}, weight decay {WEIGHT_DECAY}; "
        f"linear warm-up over {WARM_UP} steps, linear decay to zero; bfloat16 products, float32 weights"
    )
    if recipe.distil:
        rule += (
            f"; loss cross-entropy, in the last {1 - recipe.distil_from:.0%} of the steps {1 - recipe.distil:.1g} of "
            f"that and {recipe.distil:g} KL from the target's distribution"
        )
    return rule


def figures(args: argparse.Namespace, role: str, recipe: Recipe, report: Report, text: Corpus) -> dict[str, str]:
    """What was measured of the stored model, by the pattern of its place in the card. The command repeats the run: the
    steps that it did, without a limit of time."""
    model, valid = stored(args.out / FOLDERS[role]), stream(text.valid)
    nats, choices = held_out(model, valid)
    greedy = [sample(model, prompt, 400, 0.0) for prompt in PROMPTS]
    sampled = [sample(model, prompt, 600, 0.7) for prompt in PROMPTS]
    known = {word for document in text.train for word in split_words(document)}
    shares = f"{spelled(greedy, known):.1%} greedy, {spelled(sampled, known):.1%} at temperature 0.7"
    rows = {
        "seed": str(args.seed),
        "steps": f"{report.steps:,} of 4,096 bytes, {report.tokens / 1e6:.1f} M bytes in all, "
        f"{report.seconds / 60:.0f} minutes on two shared CPU cores",
        "optimiser": describe(recipe),
        "training loss": f"{report.loss:.3f} nats/byte (last 100 steps, cross-entropy)",
        "validation loss": f"{nats:.3f} nats/byte, {nats / log(2):.3f} bits/byte (context {HELD_CONTEXT})",
        "generated words that occur in the training text": shares,
    }
    if role == "draft":
        target = held_out(stored(args.out / FOLDERS["target"]), valid)[1]
        same = float((choices == target).double().mean())
        rows["greedy acceptance: its most likely next byte is the target's too"] = f"{same:.1%} of held-out positions"
    samples = {"Greedy": greedy[0], "Temperature 0.7": sampled[1], "Temperature 0.7, other prompt": sampled[2]}
    trained, held = (sum(map(len, documents)) / 1e6 for documents in (text.train, text.valid))
    command = f"python -m tools.demo_model.train --role {role} --seed {args.seed} --steps {report.steps} --minutes 1000"
    return {
        **{rf"^\| {re.escape(name)} \| [^\n]*": f"| {name} | {value} |" for name, value in rows.items()},
        **{rf"^{re.escape(n)}:\n\n```text\n(?s:.*?)\n```$": f"{n}:\n\n```text\n{t}\n```" for n, t in samples.items()},
        **{rf"`{re.escape(name)}` [\w.+~:-]*\w": f"`{name}` {version}" for name, version in text.versions.items()},
        r"^[\d.]+ M bytes for training": f"{trained:.1f} M bytes for training",
        r"and [\d.]+ M held out": f"and {held:.2f} M held out",
        r"^python -m tools\.demo_model\.train [^\n]*": f"{command} --threads {args.threads}{' --eager' * args.eager}",
        r"^This run had `--minutes [\d.]+`": f"This run had `--minutes {recipe.minutes:g}`",
    }


def update_card(card: str, found: Mapping[str, str]) -> str:
    """The card with the figures of a run in the places of the earlier ones. Raises ValueError where there is none."""
    for pattern, new in found.items():
        place = re.search(pattern, card, re.MULTILINE)
        if place is None:
            raise ValueError(f"the card has no place for {new!r}")
        card = card[: place.start()] + new + card[place.end() :]
    return card


# --- the program ------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--role", choices=["target", "draft", "both"], default="both")
    parser.add_argument("--out", type=Path, default=ASSETS, help="where demo/ and demo-draft/ go")
    parser.add_argument("--cache", type=Path, default=Path("build/demo-text"), help="where packages are unpacked")
    parser.add_argument("--steps", type=int, help="steps of 4,096 bytes (default: 6000 target, 4000 draft)")
    parser.add_argument("--minutes", type=float, help="limit for each role's training (default: 30 target, 10 draft)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--eager", action="store_true", help="no torch.compile (needs no C++ compiler; slower)")
    return parser.parse_args(argv)


def make(args: argparse.Namespace, role: str, recipe: Recipe, text: Corpus) -> Report:
    """Train one model and write its weights."""
    folder: Path = args.out / FOLDERS[role]
    folder.mkdir(parents=True, exist_ok=True)
    for name in GIVEN:
        if not (folder / name).exists():
            shutil.copy(ASSETS / FOLDERS[role] / name, folder / name)
    torch.manual_seed(args.seed)
    model = build(folder)
    report = train(args, recipe, model, stream(text.train))
    save(model, folder)
    return report


def main(argv: Sequence[str] | None = None) -> None:
    """Make what the command line asks for."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    text = load(args.cache)
    for role in ("target", "draft"):
        if args.role in (role, "both"):
            recipe = RECIPES[role]
            recipe = replace(recipe, steps=args.steps or recipe.steps, minutes=args.minutes or recipe.minutes)
            report = make(args, role, recipe, text)
            found = figures(args, role, recipe, report, text)
            card = args.out / FOLDERS[role] / "README.md"
            card.write_text(update_card(card.read_text("utf-8"), found), "utf-8")
            print(*found.values(), sep="\n")


if __name__ == "__main__":
    main()
