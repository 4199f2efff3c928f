"""Predicted step times of three plans on a cluster that doesn't exist; nothing is trained.

python examples/predict.py
"""

import thalweg
from thalweg.predict.assumptions import assumed_machine, workload_of

cluster = thalweg.Cluster.regular([2, 2], nic="10gbit", uplink="1gbit")
workload = workload_of("resnet50", gpu="v100", batch=32)
machine = assumed_machine()

for sync in ("ddp", "hierarchical", "hierarchical+powersgd(rank=4)"):
    step = thalweg.predict(sync, cluster, workload, machine)
    print(f"{step.sync}: {step.seconds:.3f} s a step ({step.low:.3f} to {step.high:.3f})")

print(thalweg.advise(cluster, workload, machine).verdict)
