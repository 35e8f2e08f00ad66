"""A plain PyTorch training loop with the monitor, which two marked lines attach.

A tiny GPT learns to count (0, 1, 2, ...) from random starting points. The script takes seconds on a CPU:

    python examples/plain_torch.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnmon

VOCAB, LENGTH, DIM, HEADS, LAYERS, BATCH, STEPS = 64, 32, 32, 4, 2, 8, 60


class Attention(nn.Module):
    """Causal self-attention through F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Pre-norm: attention, then a two-layer network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM), Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Token and position embeddings, blocks, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))


def main() -> None:
    """Train, then print what the monitor measured at the last step."""
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = attnmon.watch(model)  # 1: attach

    for step in range(STEPS):
        numbers = (torch.randint(VOCAB, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCAB
        with monitor.step():  # 2: around forward and backward
            logits = model(numbers[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), numbers[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    snapshot = monitor.flush()  # finish the measurements of the last step
    assert snapshot is not None
    for path, entropy in snapshot["entropy_norm"].items():
        print(
            f"{path}: normalized entropy (0 sharp, 1 uniform) by head: {', '.join(f'{value:.2f}' for value in entropy)}"
        )
    print(f"alerts: {len(monitor.alerts)}")
    monitor.close()


if __name__ == "__main__":
    main()
