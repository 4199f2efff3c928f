"""Handwritten digits, two batches to a step: only the second one's backward averages.

torchrun --nproc-per-node 4 examples/accumulation.py
"""

from contextlib import nullcontext

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

run = thalweg.attach(model, optimizer, data=data, batch=64, plan="ring")

for epoch in run.epochs(5):
    for number, (x, y) in enumerate(run.batches(epoch)):
        with nullcontext() if number % 2 else run.no_sync():
            loss = run.mean(cross_entropy(model(x), y, reduction="none")) / 2
            loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

if run.rank == 0:
    right = model(data.tensors[0]).argmax(1) == data.tensors[1]
    print(f"accuracy {right.float().mean():.3f}")
