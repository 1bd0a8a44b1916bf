"""AdamW with its moments in 8 bits (Dettmers et al. 2022); this file needs bitsandbytes."""

from __future__ import annotations

import bitsandbytes
import torch


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """bitsandbytes' AdamW8bit, with a state that a checkpoint can hold.

    Moments of tensors of 4096 elements and more are 8-bit codes with one scale a block of 256; smaller
    tensors keep fp32 moments (bitsandbytes' default).

    State: `step`, `state1`, `state2` (the moments), and for 8-bit ones the code tables `qmap1`, `qmap2`
    `[256]` and the scales `absmax1`, `absmax2` `[blocks]`; all plain tensors with memory of their own,
    where bitsandbytes keeps a number and one table for all parameters, which safetensors refuses.
    """

    @torch.no_grad()
    def init_state(self, group: dict, p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Zero moments of `p`."""
        super().init_state(group, p, gindex, pindex)
        state = self.state[p]
        for table in ("qmap1", "qmap2"):
            if table in state:
                state[table] = state[table].clone()
        state["step"] = torch.tensor(state["step"])  # counts in place; torch hands its value to the kernels
