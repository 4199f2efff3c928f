"""Handwritten digits, and a worker that is killed at step 20, restarted, and rejoins.

thalweg run --workers 4 --restarts 3 examples/survive.py
"""

import os
import signal
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
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

run = thalweg.attach(model, optimizer, data=data, batch=128, plan="ring")

for epoch in run.epochs(1000):
    for x, y in run.batches(epoch):
        loss = run.mean(cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sleep(0.05)  # without it the job ends before rank 2 rejoins
        if run.rank == 2 and run.step == 20 and run.members.epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if epoch >= 4 and len(run.members) == 4 and run.members.epoch > 1:
        run.stop()  # rank 2 has rejoined

if run.rank == 0:
    right = model(data.tensors[0]).argmax(1) == data.tensors[1]
    print(f"accuracy {right.float().mean():.3f}")
    for event in run.events:
        if event.kind == "incident":
            left, joined = event.data.left, event.data.joined
            change = f"without {left}" if left else f"with {joined} again"
            print(f"from step {event.step} on {change}: {event.text}")
