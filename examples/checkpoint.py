"""Handwritten digits with checkpoints: stop the run at any time and start it again.

torchrun --nproc-per-node 4 examples/checkpoint.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import thalweg

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

run = thalweg.attach(
    model, optimizer, data=data, batch=128, plan="ring", state=[scheduler], resume="checkpoint"
)

for epoch in run.epochs(5):
    for x, y in run.batches(epoch):
        loss = run.mean(cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    run.save("checkpoint")

if run.rank == 0:
    right = model(data.tensors[0]).argmax(1) == data.tensors[1]
    print(f"accuracy {right.float().mean():.3f}")
