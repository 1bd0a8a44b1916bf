"""Errors meant for the person at the keyboard: what happened, where, and what to type next."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, stable for schedulers (`docs/cli.md` lists them)."""

    OK = 0
    FAILURE = 1  # also: a success criterion of the recipe was not met
    USAGE = 2  # command line or recipe is wrong
    PREFLIGHT = 3  # data, disk, memory or lock is missing before work starts
    DIVERGED = 4  # training stopped by the guard
    REQUEUE = 75  # EX_TEMPFAIL: checkpointed, please run the same command again
    SIGINT = 130
    SIGTERM = 143


class LavraError(Exception):
    """A failure the user can act on; the command line prints it without a traceback.

    Args:
        what: what went wrong, with the value seen and the values allowed.
        where: file, line, stage or record that it happened at.
        hint: the next thing to do or type.
    """

    exit_code: ExitCode = ExitCode.FAILURE

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.hint:
            lines.append(f"  -> {self.hint}")
        return "\n".join(lines)


class UsageError(LavraError):
    """The command line or the recipe is wrong (exit 2)."""

    exit_code = ExitCode.USAGE


class PreflightError(LavraError):
    """Something needed is missing before work starts: data, disk, memory, a lock (exit 3)."""

    exit_code = ExitCode.PREFLIGHT


class DivergedError(LavraError):
    """Training stopped because the loss or the gradients are not finite (exit 4)."""

    exit_code = ExitCode.DIVERGED


class RequeueError(LavraError):
    """Interrupted after a checkpoint was written; the same command continues (exit 75)."""

    exit_code = ExitCode.REQUEUE


class InterruptedByUser(LavraError):
    """Ctrl-C after a checkpoint was written; the same command continues (exit 130)."""

    exit_code = ExitCode.SIGINT
