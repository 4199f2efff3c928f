"""Handwritten digits, averaged every eight steps.

torchrun --nproc-per-node 4 examples/local_sgd.py
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

run = thalweg.attach(model, optimizer, data=data, batch=128, plan="local_sgd(every=8)")

for epoch in run.epochs(5):
    for x, y in run.batches(epoch):
        loss = run.mean(cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with run.consensus():  # on every rank: replicas are equal inside
    right = model(data.tensors[0]).argmax(1) == data.tensors[1]
if run.rank == 0:
    print(f"accuracy {right.float().mean():.3f}")
