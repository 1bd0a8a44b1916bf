"""Train a byte-level BPE tokenizer on a recipe's corpus, or use one.

examples:
  lavra tokenizer train recipe.yaml
  lavra tokenizer info runs/quickstart
  lavra tokenizer encode runs/quickstart "some text"
  lavra tokenizer decode runs/quickstart 372 1045
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.shared import add_pipeline, add_recipe

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser("train", help="train on the corpus of a recipe")
    add_recipe(train)
    add_pipeline(train)
    for name, text in (
        ("info", "size, fertility and the longest entries"),
        ("encode", "text (or standard input) to ids"),
        ("decode", "ids to text"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("tokenizer", help="run directory or tokenizer.json")
        if name != "info":
            action.add_argument("values", nargs="*", metavar="TEXT" if name == "encode" else "ID")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    if args.action == "train":
        from lavra.cli.shared import print_json, run_until

        print_json(dict(run_until(args, "tokenizer").artifacts["tokenizer"].summary))
        return
    _use(args)


def _use(args: argparse.Namespace) -> None:
    import sys
    from pathlib import Path

    from lavra.errors import UsageError
    from lavra.tokenizer.bpe import load_tokenizer

    path = Path(args.tokenizer)
    tokenizer = load_tokenizer(path / "tokenizer/tokenizer.json" if path.is_dir() else path)
    if args.action == "info":
        print(f"vocabulary  {tokenizer.vocab_size}\nend token   {tokenizer.end_id}")
        print("longest     " + " ".join(repr(t) for t in tokenizer.longest_tokens(12)))
    elif args.action == "encode":
        text = " ".join(args.values) if args.values else sys.stdin.read()
        print(*tokenizer.encode(text))
    else:
        if wrong := [v for v in args.values if not v.isdigit() or int(v) >= tokenizer.vocab_size]:
            raise UsageError(f"not ids below {tokenizer.vocab_size}: {' '.join(wrong)}")
        print(tokenizer.decode([int(v) for v in args.values]))
