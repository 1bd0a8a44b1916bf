"""Talk to a trained model: each line you type is continued. Ctrl-D or an empty line ends.

A base model has only read text: it continues what you write and does not answer questions.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.generate import add_sampling

    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument("--max-tokens", type=int, default=120, help="longest continuation")
    add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from dataclasses import replace
    from pathlib import Path

    from lavra.console import say
    from lavra.generate.decode import generate_text
    from lavra.generate.sampling import Sampling
    from lavra.stages import load_trained

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    model, tokenizer = load_trained(Path(args.run_dir))
    say("This is a base model: it continues your text, it does not answer. Empty line to leave.")
    turn = 0
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if not prompt.strip():
            return
        turn += 1
        drawn = replace(sampling, seed=sampling.seed + turn)
        print(prompt, end="", flush=True)
        for piece in generate_text(model, tokenizer, prompt, max_tokens=args.max_tokens, sampling=drawn):
            print(piece, end="", flush=True)
        print("\n")
