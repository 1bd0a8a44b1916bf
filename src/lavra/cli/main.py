"""Entry point: find the verb, import only its file, turn errors into lines and exit codes."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from typing import NoReturn

from lavra import __version__
from lavra.errors import ExitCode, LavraError, UsageError

VERBS = {
    "quickstart": "raw text to a measured model, report and chat, in one command",
    "init": "write a commented starter recipe",
    "run": "all stages of a recipe: plan to report",
    "doctor": "what this machine can do, measured, and the fix for what is missing",
    "plan": "model, batch, horizon, memory, time and loss for a budget, before spending it",
    "corpus": "sources to clean documents, every drop accounted for",
    "tokenizer": "train, info, encode, decode",
    "tokens": "documents to token shards",
    "pretrain": "train; resumes by itself",
    "prove-resume": "that a killed and resumed training equals one that was not, bit for bit",
    "evaluate": "bits per byte on whole documents, beside xz and zstd",
    "generate": "text from a trained model",
    "chat": "talk to a trained model",
    "diagnose": "what went wrong in a training run, and what to change",
    "report": "one offline HTML page of a run",
    "runs": "ls, show, gc",
    "checkpoint": "ls, verify, show, average",
    "config": "show, schema, presets",
}
_ENVIRONMENT = """\
Settings: verbs that take a RECIPE also take overrides such as model.size=10M or budget.time=1h.
Precedence: command line > environment (LAVRA__SECTION__KEY=value) > recipe file > preset.
Exit codes: 0 ok, 1 failed or a success criterion not met, 2 usage or recipe, 3 preflight (data, disk,
memory, lock), 4 diverged, 75 checkpointed (run the same command again), 130 Ctrl-C."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(arguments)
    except LavraError as error:
        print(f"lavra: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("lavra: interrupted; run the same command again to continue", file=sys.stderr)
        code = ExitCode.SIGINT
    except BrokenPipeError:
        # The reader of our output left (`lavra ... | head`); keep the interpreter from complaining too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.OK
    except OSError as error:
        print(f"lavra: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        print(
            "  -> nothing half-written is ever used; mend it and run the same command again", file=sys.stderr
        )
        code = ExitCode.FAILURE
    sys.stdout.flush()
    sys.exit(int(code))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return ExitCode.OK
    verb = arguments[0]
    if verb in ("-V", "--version"):
        print(f"lavra {__version__}")
        return ExitCode.OK
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean `lavra {near[0]}`?" if near else "`lavra --help` lists the commands"
        raise UsageError(f"no command `{verb}`", hint=hint)
    module = importlib.import_module(f"lavra.cli.{verb.replace('-', '_')}")
    parser = argparse.ArgumentParser(
        prog=f"lavra {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return int(module.run(_parse(parser, arguments[1:])) or ExitCode.OK)


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Overrides may also stand after options, where argparse leaves them over."""
    args, rest = parser.parse_known_args(arguments)
    if wrong := [r for r in rest if "=" not in r or r.startswith("-") or not hasattr(args, "overrides")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in VERBS.items())
    return (
        f"lavra {__version__}: raw text to a measured language model, inside your hardware, time and money\n\n"
        f"usage: lavra COMMAND [options]      start here: lavra quickstart\n\n{verbs}\n\n"
        f"`lavra COMMAND --help` explains each.\n{_ENVIRONMENT}"
    )
