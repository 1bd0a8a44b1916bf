"""Hugging Face's `Trainer` without position ids: packed documents see each other."""

from __future__ import annotations

from functools import partial

from contenders.huggingface import main
from contenders.protocol import play

if __name__ == "__main__":
    play(partial(main, separate_documents=False))
