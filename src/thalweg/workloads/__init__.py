"""Small real training jobs on data that ships with their packages."""

from thalweg.workloads.find import all_jobs, find_job, parse_job, read_job
from thalweg.workloads.job import Batch, Job, JobKind, describe, seeded
from thalweg.workloads.judge import accuracy, cross_entropies, evaluating, mean_loss

__all__ = [
    "Batch",
    "Job",
    "JobKind",
    "accuracy",
    "all_jobs",
    "cross_entropies",
    "describe",
    "evaluating",
    "find_job",
    "mean_loss",
    "parse_job",
    "read_job",
    "seeded",
]
