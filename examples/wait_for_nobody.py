"""Handwritten digits under a gradient code: no rank waits for one straggler.

torchrun --nproc-per-node 4 examples/wait_for_nobody.py
"""

from time import sleep

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import thalweg

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

run = thalweg.attach(model, optimizer, data=data, batch=128, plan="gc(stragglers=1)")

late = 0
for epoch in run.epochs(5):
    for x, y in run.batches(epoch):
        if run.rank == 1 and run.counts:
            sleep(0.1)
            late += 1
        with run.shared_random():  # dropout: the same on all workers that compute these samples
            loss = run.mean(cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if run.rank == 1:
    print(f"late {late} times in {run.step} steps")
model.eval()
if run.rank == 0:
    right = model(data.tensors[0]).argmax(1) == data.tensors[1]
    print(f"accuracy {right.float().mean():.3f}")
