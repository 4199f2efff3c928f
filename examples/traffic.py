"""Handwritten digits, and the messages that a worker sends.

torchrun --nproc-per-node 4 examples/traffic.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import thalweg
from thalweg.transports import RecordedTransport, wrapping_transports

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

recorded = []


def record(transport):
    recorded.append(RecordedTransport(transport))
    return recorded[0]


with wrapping_transports(record):
    run = thalweg.attach(model, optimizer, data=data, batch=128, plan="ring")

for epoch in run.epochs(5):
    for x, y in run.batches(epoch):
        loss = run.mean(cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if run.rank == 0:
    right = model(data.tensors[0]).argmax(1) == data.tensors[1]
    print(f"accuracy {right.float().mean():.3f}")
    sent = [message.nbytes for message in recorded[0].messages if message.sent]
    print(f"sent {len(sent)} messages, {sum(sent) / run.step:.0f} bytes per step")
