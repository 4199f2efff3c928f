"""Facts: clusters, machines, workloads, and the units they are written in."""

from thalweg.facts.cluster import Cluster, Duplex, Host, Link, Rack, StragglerDelay, rack_sizes
from thalweg.facts.files import (
    format_cluster,
    format_machine,
    format_workload,
    machine_path,
    parse_cluster,
    parse_machine,
    parse_workload,
    read_cluster,
    read_machine,
    read_workload,
)
from thalweg.facts.grouping import grouped
from thalweg.facts.machine import CodecCost, FittedValue, Machine, TransportCosts
from thalweg.facts.models import MODELS, model_named
from thalweg.facts.situation import (
    FREE_MACHINE,
    Situation,
    format_situation,
    parse_situation,
    scaled,
    slowest_nic,
)
from thalweg.facts.units import MAD_TO_DEVIATION, Count, Duration, Rate, Size, about, counted
from thalweg.facts.workload import Bucket, Costs, Tensor, Workload

__all__ = [
    "FREE_MACHINE",
    "MAD_TO_DEVIATION",
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
    "scaled",
    "slowest_nic",
]
