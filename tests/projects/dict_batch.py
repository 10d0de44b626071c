"""A project as Lightning's documentation writes one: a module whose batches are a dict of two loaders'.

``python dict_batch.py STRATEGY DEVICES RESULT`` trains it and writes its losses and weights; STRATEGY is
the only thing that differs between plain Lightning ("auto") and "spindle".
"""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import nn, optim, utils

import lightning_spindle  # noqa: F401  (makes strategy="spindle" known)


class LitMultiTask(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
        )
        self.digit = nn.Linear(32, 10)
        self.decoder = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def training_step(self, batch, batch_idx):
        x, y = batch["labelled"]
        supervised = F.cross_entropy(self.digit(self.encoder(x)), y)
        (z,) = batch["unlabelled"]
        reconstruction = F.mse_loss(self.decoder(self.encoder(z)), z)
        loss = supervised + 0.1 * reconstruction
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"supervised": supervised, "reconstruction": reconstruction}, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.digit(self.encoder(x))
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


def datasets():
    draw = torch.Generator().manual_seed(0)
    x, z = torch.randn(70, 16, generator=draw), torch.randn(150, 16, generator=draw)
    y = x[:, :10].argmax(-1)
    labelled = utils.data.TensorDataset(x[:50], y[:50])
    return labelled, utils.data.TensorDataset(z), utils.data.TensorDataset(x[50:], y[50:])


class Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.values.append(float(outputs["loss"]))


def main(strategy: str, devices: str, result: str) -> None:
    L.seed_everything(1, verbose=False)
    labelled, unlabelled, held_out = datasets()
    train_loaders = CombinedLoader(
        {
            "labelled": utils.data.DataLoader(labelled, batch_size=8, shuffle=True),
            "unlabelled": utils.data.DataLoader(unlabelled, batch_size=20, shuffle=True),
        },
        "max_size_cycle",
    )
    model, losses = LitMultiTask(), Losses()
    trainer = L.Trainer(
        strategy=strategy,
        devices=int(devices),
        accelerator="cpu",
        max_epochs=6,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
        default_root_dir=result + ".d",
    )
    trainer.fit(model, train_loaders, utils.data.DataLoader(held_out, batch_size=6))
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"losses": losses.values, "metrics": metrics, "weights": model.state_dict()}, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
