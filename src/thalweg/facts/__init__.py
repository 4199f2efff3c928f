"""Facts: clusters, machines, workloads, and the units they are written in."""

from thalweg.facts.cluster import Cluster, Duplex, Host, Link, Rack, StragglerDelay, rack_sizes
from thalweg.facts.cluster_file import format_cluster, parse_cluster, read_cluster
from thalweg.facts.grouping import grouped
from thalweg.facts.machine import CodecCost, FittedValue, Machine, TransportCosts
from thalweg.facts.machine_file import format_machine, machine_path, parse_machine, read_machine
from thalweg.facts.models import MODELS, model_named
from thalweg.facts.situation import (
    FREE_MACHINE,
    Situation,
    format_situation,
    parse_situation,
)
from thalweg.facts.units import Count, Duration, Rate, Size, about, counted
from thalweg.facts.workload import Bucket, Costs, Tensor, Workload
from thalweg.facts.workload_file import format_workload, parse_workload, read_workload

__all__ = [
    "FREE_MACHINE",
    "MODELS",
    "Bucket",
    "Cluster",
    "CodecCost",
    "Costs",
    "Count",
    "Duplex",
    "Duration",
    "FittedValue",
    "Host",
    "Link",
    "Machine",
    "Rack",
    "Rate",
    "Situation",
    "Size",
    "StragglerDelay",
    "Tensor",
    "TransportCosts",
    "Workload",
    "about",
    "counted",
    "format_cluster",
    "format_machine",
    "format_situation",
    "format_workload",
    "grouped",
    "machine_path",
    "model_named",
    "parse_cluster",
    "parse_machine",
    "parse_situation",
    "parse_workload",
    "rack_sizes",
    "read_cluster",
    "read_machine",
    "read_workload",
]
