"""Schedules of point-to-point moves, and the check of their postconditions."""

from thalweg.schedules.check import check, check_code
from thalweg.schedules.coded_tree import coded_tree
from thalweg.schedules.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
)
from thalweg.schedules.dataflow import (
    Arrow,
    Message,
    Order,
    Progress,
    SlotTimeline,
    order,
    timeline,
)
from thalweg.schedules.group import Group
from thalweg.schedules.moves import Move, MoveKind, Program, Quorum
from thalweg.schedules.schedule import Condition, Content, Schedule
from thalweg.schedules.shuffle.contended_links import ContendedLinks, Rates, contended_links
from thalweg.schedules.shuffle.group_table import AveragingGroup, connected
from thalweg.schedules.topology import Topology
from thalweg.schedules.traffic import Traffic, together, traffic

__all__ = [
    "Arrow",
    "AveragingGroup",
    "Condition",
    "ContendedLinks",
    "Content",
    "Group",
    "Message",
    "Move",
    "MoveKind",
    "Order",
    "Program",
    "Progress",
    "Quorum",
    "Rates",
    "Schedule",
    "SlotTimeline",
    "Topology",
    "Traffic",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "check",
    "check_code",
    "coded_tree",
    "connected",
    "contended_links",
    "order",
    "reduce",
    "timeline",
    "together",
    "traffic",
]
