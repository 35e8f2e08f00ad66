"""A Lightning Trainer with the monitor, which is one callback.

A two-layer GPT-2 from transformers reads random bytes. The script takes seconds on a CPU and writes its logs to ./runs:

    pip install 'attnmon[lightning,huggingface,tensorboard]'
    python examples/lightning_gpt.py
"""

from __future__ import annotations

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from attnmon.lightning import AttentionMonitor


class GPT(pl.LightningModule):
    """Next-token training of a small GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=256,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        self.gpt = GPT2LMHeadModel(config)

    def training_step(self, tokens: Tensor, batch_index: int) -> Tensor:
        logits = self.gpt(tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for 30 steps, then print what the monitor measured last."""
    pl.seed_everything(0, verbose=False)
    tokens = torch.randint(256, (240, 64))
    monitor = AttentionMonitor(log_every_n_steps=10)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=pl.loggers.TensorBoardLogger("runs", name="lightning-gpt"),
        log_every_n_steps=10,
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(), DataLoader(tokens, batch_size=8))

    for path, temperature in monitor.latest["effective_temperature"].items():
        print(f"{path}: effective temperature by head: {', '.join(f'{value:.1f}' for value in temperature)}")
    print(f"alerts: {len(monitor.alerts)}")
    print(f"dashboards: tensorboard --logdir {trainer.logger.log_dir}")


if __name__ == "__main__":
    main()
