"""Hugging Face's `Trainer.train()` with a `LlamaForCausalLM`; a callback waits for our turns after each step.

Documents: position ids that restart keep them apart here (a mask of the whole row); `huggingface_causal`, without
them, is causal over the whole row.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from typing import Any

import torch
from contenders.protocol import SEQUENCES, Task, Turns, Variant, count_parameters, play
from torch.utils.data import Dataset


def variants(precisions: list[str], seq_len: int) -> list[Variant]:
    """Every variant; the first is what to expect of the others. Eager attention keeps T x T scores: short rows only."""
    return [
        Variant(precision, compile, micro_batch, attention)
        for precision in precisions
        for compile, micro_batch, attention in (
            (True, 8, "sdpa"),
            (True, 4, "sdpa"),
            (True, 2, "sdpa"),
            (False, 8, "sdpa"),
            (True, 8, "eager"),
            (False, 8, "eager"),
        )
        if attention != "eager" or seq_len <= 1024
    ]


class Rows(Dataset):
    """The task's rows over and over. Targets come shifted: all T positions predict, as everywhere else."""

    def __init__(self, task: Task, with_positions: bool) -> None:
        columns = {"input_ids": task.tokens, "labels": task.targets, "shift_labels": task.targets}
        if with_positions:
            columns["position_ids"] = task.positions
        self.rows = [{name: column[i] for name, column in columns.items()} for i in range(SEQUENCES)]

    def __len__(self) -> int:
        return SEQUENCES * 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index % SEQUENCES]


def main(task: Task, variant: Variant, turns: Turns, *, separate_documents: bool = True) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TrainerWithLoss(Trainer):
        """Remembers the loss of the step, which the callback is not told."""

        loss = 0.0

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.loss += float(loss)
            return loss

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.wait()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            loss, trainer.loss = trainer.loss, 0.0
            turns.done(loss)

    model = llama(task, variant)
    documents = bool((task.positions[:, 1:] == 0).any())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=variant.precision == "bf16-mixed",
            torch_compile=variant.compile,
            optim="adamw_torch_fused",
            learning_rate=task.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=task.betas[0],
            adam_beta2=task.betas[1],
            weight_decay=task.weight_decay,
            max_grad_norm=task.clip_norm,
            per_device_train_batch_size=variant.micro_batch,
            gradient_accumulation_steps=SEQUENCES // variant.micro_batch,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            max_steps=10**6,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = TrainerWithLoss(
            model=model,
            args=arguments,
            train_dataset=Rows(task, with_positions=documents and separate_documents),
            callbacks=[TakeTurns()],
        )
        packages = ("transformers", "accelerate")
        turns.ready(count_parameters(model), **{name: version(name) for name in packages})
        trainer.train()


def llama(task: Task, variant: Variant) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=task.shape["vocab_size"],
        hidden_size=task.shape["d_model"],
        intermediate_size=task.shape["d_ff"],
        num_hidden_layers=task.shape["n_layers"],
        num_attention_heads=task.shape["n_heads"],
        num_key_value_heads=task.shape["n_kv_heads"],
        max_position_embeddings=task.shape["seq_len"],
        rope_parameters={"rope_type": "default", "rope_theta": task.shape["rope_theta"]},
        rms_norm_eps=1e-5,
        tie_word_embeddings=task.shape["tie_embeddings"],
        use_cache=False,
        attn_implementation=variant.attention,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(llama_weights(task))
    return model.to(torch.bfloat16) if variant.precision == "bf16-true" else model


def llama_weights(task: Task) -> dict[str, torch.Tensor]:
    return task.named_weights(
        {"lm_head": "head", "model.embed_tokens": "embedding", "model.norm": "norm"},
        "model.layers.{}",
        {
            "input_layernorm": ("attention_norm",),
            "self_attn.q_proj": ("q",),
            "self_attn.k_proj": ("k",),
            "self_attn.v_proj": ("v",),
            "self_attn.o_proj": ("o",),
            "post_attention_layernorm": ("feed_forward_norm",),
            "mlp.gate_proj": ("gate",),
            "mlp.up_proj": ("up",),
            "mlp.down_proj": ("down",),
        },
    )


if __name__ == "__main__":
    play(main)
