"""Handwritten digits, and a worker that computes slowly: reports of stragglers and their causes.

torchrun --nproc-per-node 4 examples/who_is_late.py
"""

import time

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

run = thalweg.attach(model, optimizer, data=data, batch=128, plan="ring", records="records")

for epoch in run.epochs(3):
    for x, y in run.batches(epoch):
        time.sleep(0.15 if run.rank == 1 else 0.05)
        loss = run.mean(cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if run.rank == 0:
    right = model(data.tensors[0]).argmax(1) == data.tensors[1]
    print(f"accuracy {right.float().mean():.3f}")
    report = run.report()
    print(*report.stragglers, sep="\n")
    print(report.table())
