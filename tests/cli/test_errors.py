"""What a person reads after a mistake, and the exit code a scheduler gets; never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lavra.cli.main import main
from lavra.console import set_quiet

Outcome = tuple[int, str, str]


@pytest.fixture
def lavra(capsys, monkeypatch) -> Callable[..., Outcome]:
    """`lavra(*arguments)` -> exit code, standard output, standard error."""
    for name in [n for n in os.environ if n.startswith("LAVRA__")]:
        monkeypatch.delenv(name)

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        set_quiet(False)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def project(tmp_path: Path, write_project, no_measuring) -> Path:
    return write_project(tmp_path / "project")


def test_a_mistyped_verb_is_answered_with_the_nearest_one(lavra) -> None:
    assert lavra("xyzzy")[::2] == (2, "lavra: no command `xyzzy`\n  -> `lavra --help` lists the commands\n")
    code, _, text = lavra("pretrian")
    assert code == 2 and "did you mean `lavra pretrain`?" in text


def test_an_unknown_option_is_a_usage_error(lavra, project: Path) -> None:
    code, _, text = lavra("run", project, "--fast")
    assert code == 2 and "unrecognized arguments: --fast" in text


def test_overrides_may_stand_before_and_after_options(lavra, project: Path) -> None:
    arguments = ("tokens.seq_len=16", "--until", "plan", "seed=5", "--quiet", f"run_dir={project.parent}/r")
    assert lavra("run", project, *arguments)[0] == 0
    resolved = (project.parent / "r/recipe.resolved.yaml").read_text()
    assert "seed: 5" in resolved and "seq_len: 16" in resolved


def test_a_missing_recipe_is_named_by_its_absolute_path(lavra, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("run", "plan", "pretrain"):
        code, _, text = lavra(verb, "none.yaml")
        assert code == 2 and f"no recipe at {tmp_path}/none.yaml" in text


def test_five_mistakes_in_a_recipe_are_told_at_once_with_file_and_line(lavra, project: Path) -> None:
    project.write_text(
        "nam: x\n"
        "budget: {tokens: many}\n"
        "corpus:\n"
        "  sources:\n"
        "    - pth: text\n"
        "train:\n"
        "  precision: fp7\n"
        "success: {evaluate: [bits_per_bite < 1]}\n"
    )
    code, out, text = lavra("run", project)
    assert code == 2 and out == ""
    for line, words in (
        (1, "unknown key `nam`; did you mean `name`?"),
        (2, "`budget.tokens`: 'many' is not a count"),
        (5, "unknown key `corpus.sources.0.pth`; did you mean `path`?"),
        (7, "`train.precision`"),
        (8, "stage `evaluate` measures no `bits_per_bite`"),
    ):
        assert any(f"(tiny.yaml:{line})" in shown and words in shown for shown in text.splitlines()), words
    assert not (project.parent / "runs").exists()


def test_missing_text_is_named_by_the_absolute_path_that_was_tried(lavra, project: Path, monkeypatch) -> None:
    project.write_text(project.read_text().replace("path: text", "path: txet"))
    monkeypatch.chdir("/")
    code, _, text = lavra("run", project)
    assert code == 3 and str(project.parent / "txet") in text


def test_missing_text_of_quickstart_is_named_too(lavra, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, text = lavra("quickstart", "--data", "notes", "--run-dir", "2024")
    assert code == 3 and str(tmp_path / "notes") in text
    assert (tmp_path / "2024").is_dir()  # a name that YAML reads as a number is still a name


def test_an_empty_folder_is_refused_before_anything_is_built(lavra, project: Path) -> None:
    for file in (project.parent / "text").iterdir():
        file.unlink()
    code, _, text = lavra("run", project)
    assert code == 3 and str(project.parent / "text") in text
    assert not (project.parent / "runs/tiny/corpus").exists()


@pytest.mark.parametrize("verb", ["generate", "chat", "report", "diagnose"])
def test_a_folder_without_a_run_has_nothing_to_say(lavra, tmp_path: Path, verb: str) -> None:
    code, out, text = lavra(verb, tmp_path)
    assert code == 3 and out == ""
    assert str(tmp_path) in text and "  -> " in text


def test_a_vocabulary_beyond_the_corpus_names_the_largest_that_works(lavra, project: Path) -> None:
    code, _, text = lavra("run", project, "tokenizer.vocab_size=50000", "--until", "tokenizer")
    assert code == 3 and "a vocabulary of 50000 was asked for" in text
    advised = text.rpartition("set ")[2].split()[0]
    assert advised.startswith("tokenizer.vocab_size=")
    assert lavra("run", project, advised, "--until", "tokenizer")[0] == 0


def test_a_vocabulary_below_the_bytes_is_refused(lavra, project: Path) -> None:
    code, _, text = lavra("run", project, "tokenizer.vocab_size=100", "--until", "tokenizer")
    assert code == 2 and "the smallest is 260" in text


def test_a_row_longer_than_the_corpus_names_a_length_that_fits(lavra, project: Path) -> None:
    code, _, text = lavra("run", project, "tokens.seq_len=1M", "train.batch_tokens=1M")
    assert code == 3 and "fewer than one row of 1000000" in text and "set tokens.seq_len=" in text


@pytest.mark.parametrize("override", ["model.n_heads=3", "model.n_kv_heads=7"])
def test_dimensions_that_do_not_fit_together_are_a_usage_error(lavra, project: Path, override: str) -> None:
    code, _, text = lavra("plan", project, override)
    assert code == 2 and override.replace("=", " ").removeprefix("model.") in text


@pytest.mark.parametrize("option", ["--from", "--until"])
def test_an_unknown_stage_is_refused_with_the_known_ones(lavra, project: Path, option: str) -> None:
    code, _, text = lavra("run", project, option, "training")
    assert code == 2 and "no stage `training`" in text and "pretrain" in text


def test_a_start_from_a_folder_without_a_run_is_refused(lavra, project: Path) -> None:
    code, _, text = lavra("pretrain", project, "--init-from", project.parent)
    assert code == 3 and f"no trained run at {project.parent}" in text


def test_a_run_of_another_process_is_left_alone(lavra, project: Path) -> None:
    from lavra.artifact import run_lock

    for options in ((), ("--fresh",)):
        with run_lock(project.parent / "runs/tiny"):
            code, _, text = lavra("run", project, *options)
        assert code == 3 and f"in use by process {os.getpid()}" in text
    assert not (project.parent / "runs/tiny.old-1").exists()


# --- a user who may not write -------------------------------------------------------------------

UNPRIVILEGED = """
import encodings.utf_8_sig, fcntl, os, sys
import lavra.stages  # what is imported now needs no permission later
from lavra.cli.main import main
import lavra.cli.run
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
main(sys.argv[1:])
"""


@pytest.mark.parametrize("existing", [False, True], ids=["no run yet", "a run of someone else"])
def test_a_read_only_run_directory_is_told_before_work_starts(write_project, existing: bool) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = Path(name)
        recipe = write_project(folder / "project", documents=2)
        closed = folder / "closed"
        closed.mkdir()
        if existing:
            (closed / "run").mkdir()
            (closed / "run/.lock").write_text("")
            (closed / "run/.lock").chmod(0o444)
            (closed / "run").chmod(0o555)
        closed.chmod(0o555)
        folder.chmod(0o755)
        command = [sys.executable, "-c", UNPRIVILEGED, "run", str(recipe), f"run_dir={closed}/run"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        closed.chmod(0o755)
        if existing:
            (closed / "run").chmod(0o755)
    assert done.returncode == 3, done.stderr
    assert f"cannot write to {closed}/run: Permission denied" in done.stderr
    assert "run_dir=PATH" in done.stderr and "Traceback" not in done.stderr


def test_a_full_disk_while_writing_is_one_line_and_no_traceback(lavra, project: Path, monkeypatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device", "plan.json")

    monkeypatch.setattr("os.replace", full)
    code, _, text = lavra("run", project)
    assert code == 1 and "lavra: No space left on device" in text and "Traceback" not in text
