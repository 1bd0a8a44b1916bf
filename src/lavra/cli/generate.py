"""Text from a trained model. A base model continues text; it has not learned to follow instructions.

examples:
  lavra generate runs/quickstart --prompt "The function returns"
  lavra generate runs/quickstart --temperature 0 --max-tokens 200
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument("--prompt", default="", help="text to continue (default: open a new document)")
    parser.add_argument("--max-tokens", type=int, default=200)
    add_sampling(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn; shared with `chat`."""
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k most likely; 0: off")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="draw among the most likely that make up this mass"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from pathlib import Path

    from lavra.generate.decode import generate_text
    from lavra.generate.sampling import Sampling
    from lavra.stages import load_trained

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    model, tokenizer = load_trained(Path(args.run_dir))
    print(args.prompt, end="", flush=True)
    for piece in generate_text(model, tokenizer, args.prompt, max_tokens=args.max_tokens, sampling=sampling):
        print(piece, end="", flush=True)
    print()
