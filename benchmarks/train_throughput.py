"""Training speed of lavra's step beside that of a plain loop, litgpt and Hugging Face's Trainer, in one run.

    python benchmarks/peers.py                                  once: environments of the peers
    python benchmarks/train_throughput.py --size 3.4M           one setting
    python benchmarks/train_throughput.py --all --search        all settings, each peer at its fastest

Same shape, same initial weights, same random tokens, 8 sequences an optimizer step, AdamW. Each contender is a process
of its own, as a user would run it, and they take turns, so that a machine that slows down slows all; the ratio is the
median over rounds. Losses of the first steps are printed: they have to agree.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from contenders import huggingface, litgpt
from contenders.protocol import SEQUENCES, Task, Variant
from peers import DEFAULT_FOLDER, python_of
from race import Contender, ContenderFailed, Timings, fastest, race

from lavra.hardware.measure import measure_gemm
from lavra.hardware.probe import find_compiler
from lavra.model.config import ModelConfig, ModelShape, shape_for
from lavra.model.decoder import build_decoder
from lavra.units import parse_count

DOCUMENT_LENGTHS = (64, 512)
NOTES = """\
tokens/s: median over rounds. ratio: median over rounds of plain's time over its own. MFU: of the matrix product
measured before and after, in the precision the contender multiplies in (above 100 %: the machine was not quiet);
attention counts as causal over the whole row, so keeping documents apart earns MFU. peak RSS: of the process, its
compilation included."""
DOCUMENTS_NOTE = """\
documents: lavra and hf keep the packed documents of a row apart; plain, litgpt and hf-causal let them see each other
(litgpt has no way to keep them apart)."""


@dataclass(frozen=True)
class Setting:
    """What one race is about."""

    size: int
    seq_len: int = 512
    documents: bool = False

    def __str__(self) -> str:
        size = f"{self.size / 1e6:g}M, {self.seq_len}"
        return f"{size}, documents" if self.documents else size

    def shape(self) -> ModelShape:
        vocab_size = 4096 if self.size < 5_000_000 else 8192
        return shape_for(ModelConfig(), self.size, vocab_size=vocab_size, seq_len=self.seq_len)


ALL = [
    *(Setting(size) for size in (1_700_000, 3_400_000, 10_000_000, 30_000_000)),
    Setting(10_000_000, 2048, True),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_count, default=3_400_000, help="parameters (default: 3.4M)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a row (default: 512)")
    parser.add_argument(
        "--documents", action="store_true", help="rows packed with documents of 64-512 tokens"
    )
    parser.add_argument(
        "--all", action="store_true", help="1.7M, 3.4M, 10M, 30M, and 10M with documents of 2048"
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of two steps (default: 8)")
    parser.add_argument(
        "--search", action="store_true", help="time every variant of a peer, keep the fastest"
    )
    parser.add_argument(
        "--precision",
        choices=["auto", "fp32", "bf16"],
        default="auto",
        help="auto: bf16 where the machine multiplies it faster",
    )
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="default: %(default)s")
    parser.add_argument("--no-peers", action="store_true", help="only plain and lavra")
    options = parser.parse_args()
    settings = ALL if options.all else [Setting(options.size, options.seq_len, options.documents)]
    rows = [row for setting in settings for row in compare(setting, options)]
    print(
        "\n| setting | contender | how | tokens/s | ratio | MFU | peak RSS, MiB |\n|---|---|---|---|---|---|---|"
    )
    print("\n".join(rows) + "\n\n" + NOTES)
    if any(setting.documents for setting in settings):
        print(DOCUMENTS_NOTE)


def compare(setting: Setting, options: argparse.Namespace) -> list[str]:
    """Race everybody at one setting; rows of the table."""
    shape, gemm = setting.shape(), measure_gemm(torch.device("cpu"))
    bf16 = options.precision == "bf16" or (options.precision == "auto" and gemm["bf16"] > 1.2 * gemm["fp32"])
    report(f"\n{setting}: width {shape.d_model}, {shape.n_layers} layers, vocabulary {shape.vocab_size}")
    report(f"{torch.get_num_threads()} threads, matrix products in GFLOP/s: {gemm}")
    contenders = own_contenders(bf16)
    if not options.no_peers:
        # bf16-mixed first: the same mathematics as lavra in bf16. fp32 may still be faster.
        precisions = (["bf16-mixed", "bf16-true"] if bf16 else []) + ["fp32"]
        contenders += peer_contenders(setting, options.peers, precisions)
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "task.pt")
        make_task(setting, shape).save(task)
        entries = []
        for contender in contenders:
            searched = options.search and len(contender.variants) > 1
            variant = fastest(contender, task, report) if searched else contender.variants[0]
            if variant:
                entries.append((contender, variant))
        try:
            results = race(entries, task, options.rounds, report)
        except ContenderFailed as failure:
            report(f"{failure}\nno result for {setting}")
            return []
    introduce(results)
    # The better of before and after: a ceiling is easily spoilt by somebody else's work.
    after = measure_gemm(torch.device("cpu"))
    gemm = {precision: max(gemm[precision], after[precision]) for precision in gemm}
    report(f"matrix products in GFLOP/s, best of before and after: {gemm}")
    rows = [table_row(setting, shape, gemm, name, results) for name in results]
    report("\n".join(rows))  # also now: a run of all settings is long
    return rows


def own_contenders(bf16: bool) -> list[Contender]:
    """The plain loop and lavra, in this environment."""
    python, precision = Path(sys.executable), "bf16-mixed" if bf16 else "fp32"
    layouts = (SEQUENCES, SEQUENCES // 2, SEQUENCES // 4)
    contenders = [
        Contender("plain", "plain", python, [Variant()]),
        Contender("lavra eager", "lavra", python, [Variant(precision, micro_batch=size) for size in layouts]),
    ]
    if find_compiler():
        variants = [Variant(precision, compile=True, micro_batch=size) for size in layouts]
        contenders.append(Contender("lavra compiled", "lavra", python, variants))
    return contenders


def peer_contenders(setting: Setting, folder: Path, precisions: list[str]) -> list[Contender]:
    """The peers whose environments are there; the others are mentioned."""
    entries = [("litgpt", "litgpt", "litgpt", litgpt), ("hf", "huggingface", "huggingface", huggingface)]
    if setting.documents:
        entries.append(("hf-causal", "huggingface_causal", "huggingface", huggingface))
    contenders = []
    for name, module, environment, declared in entries:
        python = python_of(folder, environment)
        variants = [
            variant
            for variant in declared.variants(precisions, setting.seq_len)
            if find_compiler() or not variant.compile
        ]
        if python.exists():
            contenders.append(Contender(name, module, python, variants))
        else:
            report(f"{name} does not take part: no environment in {folder} (python benchmarks/peers.py)")
    return contenders


def make_task(setting: Setting, shape: ModelShape) -> Task:
    """Random tokens; with documents, rows cut at random places."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(shape.vocab_size, (SEQUENCES, shape.seq_len + 1), generator=generator)
    positions = torch.arange(shape.seq_len).repeat(SEQUENCES, 1)
    if setting.documents:
        draw = random.Random(0)
        for row in positions:
            start = 0
            while start < shape.seq_len:
                end = start + draw.randint(*DOCUMENT_LENGTHS)
                row[start:end] = torch.arange(len(row[start:end]))
                start = end
    return Task(shape.model_dump(), build_decoder(shape, seed=0).state_dict(), stream, positions)


def introduce(results: dict[str, Timings]) -> None:
    """Versions, parameters and first losses of all; a warning where they do not train the same thing."""
    plain = results["plain"]
    for name, timings in results.items():
        facts = timings.facts
        versions = " ".join(f"{package} {number}" for package, number in facts["versions"].items())
        losses = ", ".join(f"{loss:.4f}" for loss in timings.first_losses)
        report(f"{name} ({timings.variant}): {versions}; {facts['parameters']:,} parameters; losses {losses}")
        if abs(facts["parameters"] / plain.facts["parameters"] - 1) > 0.01:
            report(f"WARNING: {name} has another number of parameters than plain")
        if abs(timings.first_losses[0] / plain.first_losses[0] - 1) > 0.01:
            report(f"WARNING: the first loss of {name} is not that of plain")


def table_row(
    setting: Setting, shape: ModelShape, gemm: dict[str, float], name: str, results: dict[str, Timings]
) -> str:
    timings = results[name]
    rate = SEQUENCES * shape.seq_len / statistics.median(timings.seconds)
    pairs = zip(results["plain"].seconds, timings.seconds, strict=True)
    ratio = statistics.median(plain / mine for plain, mine in pairs)
    ceiling = gemm["fp32" if timings.variant.precision == "fp32" else "bf16"] * 1e9
    mfu = rate * shape.flops_per_token() / ceiling
    return (
        f"| {setting} | {name} | {timings.variant} | {rate:,.0f} | {ratio:.2f} | {mfu:.0%} "
        f"| {timings.peak_mib:,.0f} |"
    )


def report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
