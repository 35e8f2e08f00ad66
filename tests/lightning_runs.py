"""A small LightningModule, its data and its Trainer, with whichever package of Lightning they are asked for."""

import torch
import torch.nn.functional as F
from torch import nn

from attnmon.writers import Writer

LENGTH, WIDTH = 12, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        q, k, v = self.qkv(hidden).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def module_of(lightning, net=None, **methods):
    """A LightningModule; ``methods`` replace its own."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Attention() if net is None else net

        def training_step(self, batch, batch_idx):
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.net(batch)

        test_step = predict_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    for name, method in methods.items():
        setattr(Module, name, method)
    torch.manual_seed(0)
    return Module()


def loader(batches=8, seed=0, batch_size=2):
    data = torch.randn(batches * batch_size, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def trainer_of(lightning, root, callbacks=None, **options):
    defaults = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": root,
    }  # fmt: skip
    return lightning.Trainer(callbacks=callbacks, **(defaults | options))


class Keeper(Writer):
    def __init__(self):
        self.snapshots, self.alerts = [], []

    def write_snapshot(self, snapshot):
        self.snapshots.append(snapshot)

    def write_alerts(self, alerts):
        self.alerts += alerts

    @property
    def steps(self):
        return [snapshot.step for snapshot in self.snapshots]
