"""Handwritten digits in as many processes as are started; each draws its own samples.

torchrun --nproc-per-node 4 examples/one_line.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import thalweg

x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
thalweg.attach(model, optimizer, plan="ring")

for _ in range(5):
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

right = model(data.tensors[0]).argmax(1) == data.tensors[1]
print(f"accuracy {right.float().mean():.3f}")
