"""A synthetic run directory with every file that the report reads, hostile text included."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

HOSTILE = '<script>document.title="owned"</script><img src=x onerror=alert(1)>"\'&'
STAGES = {"corpus": 14.0, "tokenizer": 6.5, "tokens": 3.2, "pretrain": 236.0, "evaluate": 21.0, "report": 0.6}
STEPS, BATCH = 1200, 8192


@pytest.fixture(scope="session")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not change it."""
    return write_run(tmp_path_factory.mktemp("runs") / "laptop-5m")


def write_run(folder: Path) -> Path:
    """Write all files of a plausible five-minute run."""
    folder.mkdir(parents=True)
    write_origin(folder)
    write_plan(folder)
    write_corpus(folder / "corpus")
    write_tokenizer(folder / "tokenizer")
    write_training(folder)
    write_evaluation(folder)
    return folder


def put(path: Path, value: Any) -> None:
    """Write JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_origin(folder: Path) -> None:
    recipe = f"name: laptop-5m\nbudget: 5m\ncorpus:\n  sources:\n    - path: python:stdlib  # {HOSTILE}\n"
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (folder / "recipe.resolved.yaml").write_text(recipe + "seed: 1\n", encoding="utf-8")
    put(folder / "STATUS", {"state": "running", "pid": 7, "stage": "report", "step": STEPS})
    put(
        folder / "environment.json",
        {
            "python": "3.12.4",
            "torch": "2.9.0",
            "platform": "Linux x86_64",
            "cpu": "a laptop processor",
            "cores": 8,
            "memory_bytes": 16 << 30,
            "accelerators": [],
            "git_commit": "0123abcd",
            "gemm_gflops_fp32": 412.0,
            "gemm_gflops_bf16": 655.0,
        },
    )
    put(
        folder / "success.json",
        [
            {"stage": "corpus", "criterion": "kept_fraction >= 0.5", "value": 0.871, "passed": True},
            {"stage": "evaluate", "criterion": "bits_per_byte < 2.4", "value": 1.9123, "passed": True},
            {"stage": "pretrain", "criterion": "final_loss < 1.5", "value": 2.9731, "passed": False},
        ],
    )


def write_plan(folder: Path) -> None:
    model = {"d_model": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "d_ff": 704, "vocab_size": 4096}
    predictions = {
        "parameters": 5_310_000,
        "flops": 3.4e14,
        "peak_memory_bytes": 1.31e9,
        "disk_bytes": 2.2e8,
        "tokens_per_second": 43_000,
        "wall_seconds": 288.0,
        "final_loss": 2.91,
        "final_bpb": 1.87,
    }
    put(
        folder / "plan.json",
        {
            "decisions": {
                "model": {**model, "seq_len": 256, "tie_embeddings": True},
                "parameters": 5_310_000,
                "micro_batch_size": 16,
                "batch_tokens": BATCH,
                "gradient_accumulation": 2,
                "precision": "bf16",
                "compile": "off",
                "learning_rate": 0.0021,
                "corpus_max_bytes": 64_000_000,
            },
            "horizon": {"steps": STEPS, "tokens": STEPS * BATCH, "decided": "after 12 s of calibration"},
            "budget": {"kind": "time", "value": 300.0},
            "predictions": {**predictions, "stage_seconds": {**STAGES, "pretrain": 240.0, "corpus": 18.0}},
            "basis": {
                "flops": "Closed form: 6 x parameters x tokens plus attention; exact up to the optimizer.",
                "tokens_per_second": "Measured GEMM ceiling times 0.35; uncertain by a third.",
                "final_loss": "Scaling law fitted on small runs of the same text; uncertain by 5 %.",
                "stage_seconds": "Throughputs of the probe; pretrain gets what is left of the budget.",
            },
            "notes": ["The corpus is smaller than the horizon: 1.4 epochs.", f"A hostile note {HOSTILE}"],
        },
    )
    measured = {
        "parameters": 5_310_000,
        "flops": 3.31e14,
        "peak_memory_bytes": 1.52e9,
        "disk_bytes": 2.31e8,
        "tokens_per_second": 41_650,
        "wall_seconds": 281.3,
        "final_loss": 2.9731,
        "final_bpb": 1.9123,
    }
    put(folder / "measured.json", {**measured, "stage_seconds": STAGES})


def write_corpus(folder: Path) -> None:
    def both(documents: int, size: int) -> dict[str, int]:
        return {"documents": documents, "bytes": size}

    totals = {
        "records_in": both(2210, 31_400_000),
        "kept": both(1925, 28_100_000),
        "train": both(1831, 26_700_000),
        "validation": both(94, 1_400_000),
        "dropped": both(263, 3_100_000),
        "errors": both(22, 200_000),
        "sampled_out": both(0, 0),
    }
    put(
        folder / "accounting.json",
        {
            "totals": {**totals, "blank_lines": 3},
            "reasons": {
                "too_short": {**both(140, 9_000), "only": 131},
                "duplicate": {**both(88, 2_700_000), "only": 88},
                "long_line": {**both(35, 391_000), "only": 26},
            },
            "errors": {"not_utf8": both(22, 200_000)},
            "by_source": {
                "python:stdlib": {**totals, "reasons": {"too_short": 140, "duplicate": 88}, "blank_lines": 3},
                HOSTILE: {name: both(0, 0) for name in totals},
            },
            "by_kind": {"code": totals, "prose": totals},
            "split": {"validation_groups": 17, "target_bytes": {"prose": 70_000, "code": 1_330_000}},
            "notes": ["Sizes are UTF-8 bytes of text."],
        },
    )
    errors = folder.with_name("documents") / "errors"
    for new in (folder / "dropped", errors):
        new.mkdir(parents=True)
    pq.write_table(
        pa.table(
            {
                "reasons": [["too_short", "few_letters"]] * 3 + [["duplicate"]] * 9,
                "excerpt": ["x = 1\n# tiny"] * 2 + [HOSTILE] + ["def main():\n    return 0"] * 9,
                "source": ["python:stdlib"] * 12,
                "path": [f"lib/{i}.py" for i in range(12)],
                "bytes": [12] * 12,
                "duplicate_of": [None] * 3 + ["lib/main.py"] * 9,
            }
        ),
        folder / "dropped" / "00000.parquet",
    )
    pq.write_table(
        pa.table(
            {
                "source": ["mine"],
                "path": ["bad.jsonl"],
                "place": ["line 7"],
                "reason": ["not_utf8"],
                "excerpt": ["caf\\xe9 " + HOSTILE],
            }
        ),
        errors / "00000.parquet",
    )


def write_tokenizer(folder: Path) -> None:
    put(folder / "COMPLETE", {"summary": {"vocab_size": 4096, "bytes_per_token": 3.4123}})
    put(folder.with_name("tokens") / "COMPLETE", {"summary": {"train_tokens": 7_824_000}})
    code = ["def", " render", "(", "run", ")", ":", "\n   ", " return", " page", "(", "run", ".", "name", ")"]
    prose = ["Raw", " text", " be", "comes", " a", " meas", "ured", " lang", "uage", " model", "."]
    examples = [{"text": "".join(tokens), "tokens": tokens} for tokens in (prose, code, [HOSTILE])]
    longest = ["                    ", "NotImplementedError", " implementation", HOSTILE]
    facts = {
        "bytes_per_token_by_kind": {"code": 3.35, "prose": 4.1},
        "examples": examples,
        "longest_tokens": longest,
    }
    put(folder / "facts.json", facts)


def write_training(folder: Path) -> None:
    noise = random.Random(1)
    lines = []
    for step in range(5, STEPS + 1, 5):
        tokens, warmup = step * BATCH, min(step / 60, 1.0)
        loss = 2.72 + 5.6 * (1 + step / 14) ** -0.62
        record = {
            "step": step,
            "tokens": tokens,
            "time": tokens / 41_650,
            "train/loss": loss + noise.gauss(0, 0.05) if step != 600 else None,
            "train/lr": 0.0021 * warmup * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS))),
            "train/grad_norm": 0.4 + 4 / (1 + step / 20) + abs(noise.gauss(0, 0.05)),
            "perf/tok_per_s": 41_650 + noise.gauss(0, 500) - (9000 if step < 10 else 0),
            "perf/mfu": 0.36 + noise.gauss(0, 0.005),
            "perf/data_wait_frac": abs(noise.gauss(0.004, 0.002)),
            "mem/rss_gib": 1.2 + 0.2 * warmup,
        }
        if step % 60 == 0:
            record |= {"val/loss": loss + 0.12, "val/bpb": (loss + 0.12) / math.log(2) / 2.22}
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    events = [
        {"step": 5, "kind": "start", "text": "from scratch"},
        {"step": 600, "kind": "skip", "text": f"loss not finite; batch skipped {HOSTILE}"},
        {"step": STEPS, "kind": "checkpoint", "text": "checkpoints/step-00001200"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events), encoding="utf-8")
    (folder / "samples").mkdir()
    texts = {
        100: "def the(self, se in the selfself, the\n    the = the the = se) ret\n",
        400: "def get_name(self, name):\n    if name is not None:\n        return name.self\n",
        800: f"class Reader:\n    def __init__(self, file):\n        self.file = file\n{HOSTILE}\n",
        1200: 'class Reader:\n    """Read."""\n\n    def __init__(self, path):\n        self.path = path\n',
    }
    for step, text in texts.items():
        (folder / "samples" / f"step-{step:08}.md").write_text(text, encoding="utf-8")


def write_evaluation(folder: Path) -> None:
    def coded(documents: int, size: int, *bits: float) -> dict[str, Any]:
        return {
            "documents": documents,
            "bytes": size,
            **dict(zip(("lavra", "xz", "zstd"), bits, strict=True)),
        }

    types = [
        {"file_type": ".py", "kind": "code", **coded(71, 1_100_000, 1.71, 1.98, 2.11)},
        {"file_type": ".rst", "kind": "prose", **coded(14, 210_000, 2.44, 2.61, 2.83)},
        {"file_type": ".txt", "kind": "prose", **coded(9, 90_000, 2.91, 2.66, 2.9)},
    ]
    kinds = [
        {"kind": "code", **coded(71, 1_100_000, 1.71, 1.98, 2.11)},
        {"kind": "prose", **coded(23, 300_000, 2.57, 2.63, 2.85)},
    ]
    names = [f"lib/module_{i}.py" for i in range(12)] + [HOSTILE]
    files = [
        {
            "path": name,
            "file_type": ".py",
            "bytes": 900 * (i + 3),
            "lavra": 1.3 + i / 9,
            "xz": 1.9,
            "zstd": 2.1,
        }
        for i, name in enumerate(names)
    ]
    put(
        folder / "eval" / "results.json",
        {
            "bits_per_byte": 1.9123,
            "documents": 94,
            "bytes": 1_400_000,
            "by_file_type": types,
            "by_kind": kinds,
            "total": {"lavra": 1.9123, "xz": 2.1201, "zstd": 2.2703},
            "all_together": {"xz": 1.402, "zstd": 1.511},
            "files": files,
            "notes": ["Every byte of the held-out text is scored exactly once."],
        },
    )
