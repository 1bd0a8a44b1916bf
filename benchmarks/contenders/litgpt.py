"""litgpt's `pretrain.main`, unchanged: its model, its loop, its logging. Its data loader waits for our turns.

What its configuration allows is set for speed: fused AdamW (litgpt asks for it on CUDA only; a class of our own gets
it on the CPU), compiled or not, the micro-batch. `main` always compiles; "force_eager" is PyTorch's own way out.
litgpt cannot keep packed documents apart: it is causal over the whole row.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from contenders.protocol import SEQUENCES, Task, Turns, Variant, count_parameters, play
from torch.utils.data import DataLoader, IterableDataset

FABRIC_PRECISION = {"fp32": "32-true", "bf16-mixed": "bf16-mixed", "bf16-true": "bf16-true"}


def variants(precisions: list[str], seq_len: int) -> list[Variant]:
    """Every variant; the first is what to expect of the others."""
    return [
        Variant(precision, compile, micro_batch)
        for precision in precisions
        for compile, micro_batch in ((True, 8), (True, 4), (True, 2), (False, 8))
    ]


class FusedAdamW(torch.optim.AdamW):
    """Named in litgpt's optimizer setting; without a parameter `fused`, litgpt leaves it alone."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


class RowsInTurns(IterableDataset):
    """The task's rows for ever. When the loop asks for a step's first row, the step before is complete."""

    def __init__(self, task: Task, turns: Turns, log: Any) -> None:
        self.task, self.turns, self.log = task, turns, log

    def __iter__(self):
        self.turns.wait()
        while True:
            yield from self.task.stream
            self.turns.done(self.log.loss)


def main(task: Task, variant: Variant, turns: Turns) -> None:
    import lightning
    from lightning.fabric.loggers import Logger
    from litgpt import pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule

    class LossLog(Logger):
        """What litgpt logs, of which we keep the loss of the last step."""

        name, version, loss = "losses", 0, float("nan")

        def log_metrics(self, metrics: dict, step: int | None = None) -> None:
            self.loss = metrics["loss"]

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    class Rows(DataModule):
        """litgpt's interface to data: training rows come in turns, two batches serve its check of validation."""

        def connect(
            self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None
        ) -> None:
            self.batch_size = batch_size

        def train_dataloader(self) -> DataLoader:
            return DataLoader(RowsInTurns(task, turns, log), batch_size=self.batch_size)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(list(task.stream[: 2 * self.batch_size]), batch_size=self.batch_size)

    torch.set_float32_matmul_precision("high")  # as litgpt's command line does
    if not variant.compile:
        torch.compiler.set_stance("force_eager")
    log, config = LossLog(), litgpt_config(task)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, precision=FABRIC_PRECISION[variant.precision], loggers=[log]
    )
    fabric.launch()
    turns.ready(parameter_count(config, task), litgpt=version("litgpt"), lightning=version("lightning"))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(litgpt_weights(task), Path(folder, "lit_model.pth"))
        pretrain.main(
            fabric=fabric,
            devices=1,
            seed=0,
            initial_checkpoint_dir=Path(folder),
            resume=False,
            config=config,
            data=Rows(),
            out_dir=Path(folder, "out"),
            tokenizer_dir=None,
            tokenizer=None,
            train=TrainArgs(
                save_interval=None,
                global_batch_size=SEQUENCES,
                micro_batch_size=variant.micro_batch,
                max_tokens=10**12,
                max_norm=task.clip_norm,
                min_lr=task.learning_rate,
                lr_warmup_steps=0,
                tie_embeddings=task.shape["tie_embeddings"],
            ),
            eval=EvalArgs(interval=10**9, initial_validation=False, final_validation=False),
            optimizer={
                "class_path": "contenders.litgpt.FusedAdamW",
                "init_args": {
                    "lr": task.learning_rate,
                    "betas": task.betas,
                    "weight_decay": task.weight_decay,
                },
            },
        )


def litgpt_config(task: Task) -> Any:
    from litgpt import Config

    return Config(
        name="benchmark",
        block_size=task.shape["seq_len"],
        vocab_size=task.shape["vocab_size"],
        padded_vocab_size=task.shape["vocab_size"],
        n_layer=task.shape["n_layers"],
        n_head=task.shape["n_heads"],
        n_query_groups=task.shape["n_kv_heads"],
        n_embd=task.shape["d_model"],
        intermediate_size=task.shape["d_ff"],
        rotary_percentage=1.0,
        rope_base=task.shape["rope_theta"],
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-5,
        mlp_class_name="LLaMAMLP",
    )


def litgpt_weights(task: Task) -> dict[str, torch.Tensor]:
    return task.named_weights(
        {"lm_head": "head", "transformer.wte": "embedding", "transformer.ln_f": "norm"},
        "transformer.h.{}",
        {
            "norm_1": ("attention_norm",),
            "attn.qkv": ("q", "k", "v"),
            "attn.proj": ("o",),
            "norm_2": ("feed_forward_norm",),
            "mlp.fc_1": ("gate",),
            "mlp.fc_2": ("up",),
            "mlp.proj": ("down",),
        },
    )


def parameter_count(config: Any, task: Task) -> int:
    """Of the model that `pretrain.main` is about to build."""
    from litgpt import GPT

    with torch.device("meta"):
        model = GPT(config)
    if task.shape["tie_embeddings"]:
        model.transformer.wte.weight = model.lm_head.weight
    return count_parameters(model)


if __name__ == "__main__":
    play(main)
