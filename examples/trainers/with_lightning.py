"""A LightningModule under DDP, over the backend thalweg.

python examples/trainers/with_lightning.py
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "thalweg"


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch):
        x, y = batch
        loss = cross_entropy(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(0, verbose=False)
x = torch.randn(320, 16)
data = TensorDataset(x, x[:, :4].argmax(1))
model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=BACKEND),
    max_steps=20,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
)
trainer.fit(model, DataLoader(data, batch_size=8))

weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
print(f"rank {trainer.global_rank}: norm {weights.double().norm():.12f}", flush=True)
