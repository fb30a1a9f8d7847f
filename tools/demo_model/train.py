"""Make the two demo models: `python -m tools.demo_model.train`.

Fetches the text, trains the target, trains the draft on the same text and then on the target's distribution, measures
both on held-out chapters, and writes two Hugging Face folders with model cards. An interrupted run leaves its last
checkpoint in place (with the card of the run before it, if any).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from . import card, corpus, evaluate, optimise, shapes, tokens

FOLDERS = {"target": "demo", "draft": "demo-draft"}


@dataclass(frozen=True)
class Recipe:
    """Defaults of one role; the command line overrides steps and minutes."""

    steps: int
    minutes: float
    learning_rate: float
    distil: float = 0.0
    distil_from: float = 0.0


RECIPES = {
    "target": Recipe(steps=6000, minutes=30, learning_rate=3e-3),
    "draft": Recipe(steps=4000, minutes=10, learning_rate=4e-3, distil=0.7, distil_from=0.7),
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--role", choices=["target", "draft", "both"], default="both")
    parser.add_argument("--out", type=Path, default=Path("ferrum_rpc/assets"), help="where demo/ and demo-draft/ go")
    parser.add_argument("--cache", type=Path, default=Path("build/demo-text"), help="where packages are unpacked")
    parser.add_argument("--steps", type=int, help="steps of 4,096 bytes (default: 6000 target, 4000 draft)")
    parser.add_argument("--minutes", type=float, help="limit for each role's training (default: 30 target, 10 draft)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--save-minutes", type=float, default=5.0, help="how often to write a checkpoint")
    parser.add_argument("--eager", action="store_true", help="no torch.compile (needs no C++ compiler; slower)")
    return parser.parse_args()


def stream(documents: list[str]) -> Tensor:
    """Documents as one `int64` vector of ids."""
    return torch.frombuffer(bytearray(tokens.encode_documents(documents)), dtype=torch.int16).long()


def command(args: argparse.Namespace, role: str, report: optimise.Report) -> str:
    """The command that repeats this role's run: the steps it did, without a limit of time. Folders are the defaults."""
    eager = " --eager" if args.eager else ""
    return (
        f"python -m tools.demo_model.train --role {role} --seed {args.seed} --steps {report.steps} "
        f"--minutes 1000 --threads {args.threads}{eager}"
    )


def make(args: argparse.Namespace, role: str, text: corpus.Corpus) -> None:
    """Train, measure and write one model."""
    recipe = RECIPES[role]
    plan = optimise.Plan(
        steps=args.steps or recipe.steps,
        minutes=args.minutes or recipe.minutes,
        seed=args.seed,
        learning_rate=recipe.learning_rate,
        distil=recipe.distil,
        distil_from=recipe.distil_from,
    )
    folder: Path = args.out / FOLDERS[role]
    teacher = shapes.load(args.out / FOLDERS["target"]) if recipe.distil else None
    torch.manual_seed(plan.seed)
    model = shapes.build(role)
    report = optimise.train(
        model,
        stream(text.train),
        plan,
        teacher=teacher,
        checkpoint=lambda report: shapes.save(model, role, folder),
        every_minutes=args.save_minutes,
        compiled=not args.eager,
    )
    shapes.save(model, role, folder)
    (folder / "README.md").write_text(card.write(measure(args, role, plan, report, text)), "utf-8")


def measure(
    args: argparse.Namespace, role: str, plan: optimise.Plan, report: optimise.Report, text: corpus.Corpus
) -> card.Facts:
    """Load what was stored and state what it is worth."""
    model: Qwen3ForCausalLM = shapes.load(args.out / FOLDERS[role])
    valid = stream(text.valid)
    held = evaluate.held_out(model, valid)
    acceptance = None
    if role == "draft":
        target = evaluate.held_out(shapes.load(args.out / FOLDERS["target"]), valid)
        acceptance = evaluate.agreement(held, target)
    greedy = [evaluate.sample(model, prompt, 400, 0.0) for prompt in evaluate.PROMPTS]
    sampled = [evaluate.sample(model, prompt, 600, 0.7) for prompt in evaluate.PROMPTS]
    words = text.words()
    facts = card.Facts(
        role=role,
        command=command(args, role, report),
        seed=plan.seed,
        steps=report.steps,
        tokens=report.tokens,
        minutes=report.seconds / 60,
        limit=plan.minutes,
        optimiser=describe(plan),
        train_nats=report.loss,
        valid_nats=held.nats,
        valid_bits=held.bits,
        spelled_greedy=evaluate.spelled(greedy, evaluate.PROMPTS, words),
        spelled_sampled=evaluate.spelled(sampled, evaluate.PROMPTS, words),
        parameters=shapes.parameters(model),
        versions=text.versions,
        sizes=(sum(map(len, text.train)), sum(map(len, text.valid))),
        acceptance=acceptance,
        samples={"Greedy": greedy[0], "Temperature 0.7": sampled[1], "Temperature 0.7, other prompt": sampled[2]},
    )
    print({name: value for name, value in card.as_json(facts).items() if name != "samples"})
    print(*greedy, *sampled, sep="\n---\n")
    return facts


def describe(plan: optimise.Plan) -> str:
    """The optimiser in words."""
    rule = (
        f"AdamW {plan.learning_rate:g}, betas {plan.betas[0]} and {plan.betas[1]}, weight decay {plan.weight_decay}; "
        f"linear warm-up over {plan.warmup} steps, linear decay to zero; bfloat16 products, float32 weights"
    )
    if plan.distil:
        rule += (
            f"; loss cross-entropy, in the last {1 - plan.distil_from:.0%} of the steps {1 - plan.distil:.1g} of that "
            f"and {plan.distil:g} KL from the target's distribution"
        )
    return rule


def main() -> None:
    """Make what the command line asks for."""
    args = parse()
    torch.set_num_threads(args.threads)
    text = corpus.load(args.cache)
    for role in ("target", "draft"):
        if args.role in (role, "both"):
            make(args, role, text)


if __name__ == "__main__":
    main()
