"""From a plan and a step to rounds: a pure function, the same everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thalweg import Cluster, Group, Size, Workload, check, compile_step, parse_plan
from thalweg.errors import LayoutError, PlanError
from thalweg.facts import Tensor
from thalweg.plan import Cadence
from thalweg.schedules import timeline, traffic
from thalweg.schedules.topologies import shuffle
from thalweg.steps import Chain, Round, Work

RACKS = Group.everybody(Cluster.regular([4, 4], nic="200mbit", uplink="50mbit"))
MATRIX = Workload(
    name="one", tensors=(Tensor(name="w", shape=(512, 256)), Tensor(name="b", shape=(512,)))
)


def rounds(
    text: str, step: int = 0, group: Group = RACKS, workload: Workload = MATRIX
) -> list[Round]:
    compiled = compile_step(parse_plan(text), group, workload, step).rounds
    for round_ in compiled:
        check(round_.schedule)
    return compiled


def chains(
    text: str, step: int = 0, group: Group = RACKS, workload: Workload = MATRIX
) -> tuple[Chain, ...]:
    return compile_step(parse_plan(text), group, workload, step).chains


def stages(chain: Chain) -> list[tuple[Work, list[str]]]:
    return [(s.work, list(dict.fromkeys(r.payload.name for r in s.rounds))) for s in chain.stages]


def shape(compiled: list[Round]) -> list[tuple[str, str, int]]:
    return [(r.payload.name, r.schedule.name, r.payload.nbytes) for r in compiled]


def test_one_round_a_bucket() -> None:
    workload = Workload.of_size(Size.parse("25MB"))
    compiled = chains("ring @ bucket=4MB", workload=workload)
    assert [chain.bucket for chain in compiled] == list(range(6))
    payloads = [[round_.payload.nbytes for round_ in chain.rounds] for chain in compiled]
    assert sum(nbytes for [nbytes] in payloads) == workload.nbytes


def test_it_is_a_pure_function() -> None:
    for text in ("hierarchical+powersgd", "dssync", "ring+int8"):
        once, again = rounds(text, 3), rounds(text, 3)
        assert shape(once) == shape(again)
        for one, other in zip(once, again, strict=True):
            ranks = one.schedule.ranks
            assert all(list(one.schedule.moves(r)) == list(other.schedule.moves(r)) for r in ranks)


def test_summable_payloads_go_through_the_topology() -> None:
    assert shape(rounds("tree+fp16")) == [("fp16", "tree", 2 * (512 * 256 + 512))]
    assert shape(rounds("hierarchical+powersgd(rank=4)")) == [
        ("P", "hierarchical", 4 * 4 * 512),
        ("Q", "hierarchical", 4 * 4 * 256),
        ("exact", "hierarchical", 4 * 512),
    ]


def test_the_codec_works_between_the_stages() -> None:
    """Uncompressed tensors, and the scales of a payload, go with the first payload."""
    assert [stages(chain) for chain in chains("ring")] == [[(Work.NOTHING, ["values"])]]
    [chain] = chains("hierarchical+powersgd")
    assert stages(chain) == [
        (Work.ENCODE, ["P", "exact"]),
        (Work.REDUCE, ["Q"]),
        (Work.DECODE, []),
    ]
    [chain] = chains("ring+sign")
    assert stages(chain) == [
        (Work.ENCODE, ["signs", "scales", "exact"]),
        (Work.REDUCE, ["signs"]),
        (Work.DECODE, []),
    ]
    [chain] = chains("ring+int8(warmup=2)", 1)
    assert stages(chain) == [(Work.NOTHING, ["values"])]


def test_compression_between_racks_is_the_work_of_their_first_ranks() -> None:
    [chain] = chains("hierarchical(compress=between)+fp16")
    assert stages(chain) == [
        (Work.NOTHING, ["rack's sum"]),
        (Work.ENCODE, ["fp16"]),
        (Work.DECODE, ["result"]),
    ]
    for rank in RACKS.ranks:
        own = chain.of(rank)
        assert own is not None
        assert all(rank in round_.group.ranks for round_ in own.rounds)
        works = [stage.work for stage in own.stages]
        if rank in (0, 4):
            assert works == [Work.NOTHING, Work.ENCODE, Work.DECODE]
        else:
            assert works == [Work.NOTHING, Work.NOTHING]


def test_a_rank_without_rounds_has_no_chain() -> None:
    first, *_ = chains("local_sgd(every=1, levels=rack, delay=1)")
    assert [rank for rank in RACKS.ranks if first.of(rank) is not None] == [0, 1, 2, 3]


def test_acpsgd_sends_one_factor_a_step() -> None:
    assert [r.payload.name for r in rounds("ring+acpsgd", 0)] == ["P", "exact"]
    assert [r.payload.name for r in rounds("ring+acpsgd", 1)] == ["Q", "exact"]


def test_the_others_take_two_shots_or_gather() -> None:
    large = [r.schedule.name for r in rounds("ring+int8") if not r.payload.exact]
    assert large == ["all_to_all", "all_gather"]
    pair = Group.everybody(Cluster.flat(2))  # half of two shots is as much as one gather
    assert [r.schedule.name for r in rounds("ring+int8", group=pair) if not r.payload.exact] == [
        "all_gather"
    ]
    assert [r.schedule.name for r in rounds("ring+topk") if not r.payload.exact] == ["all_gather"]


def test_two_shots_are_not_taken_where_the_uplinks_would_choke() -> None:
    """An exchange sends G (N-G)/N payloads through an uplink, a gathering ring N-1 of them."""
    lone = Cluster.regular([1] * 4, nic="10gbit", uplink="10mbit")
    names = [
        r.schedule.name
        for r in rounds("ring+int8", group=Group.everybody(lone))
        if not r.payload.exact
    ]
    assert names == ["all_to_all", "all_gather"]


def test_buckets_of_one_size_share_their_schedule() -> None:
    compiled = rounds("ring @ bucket=4MB", workload=Workload.of_size(Size.parse("250MB")))
    assert len({id(r.schedule) for r in compiled}) <= 2
    assert len(compiled) > 50


def test_two_shots_carry_what_they_should() -> None:
    """2(N-1)/N of the payload, against N-1 for a gather."""
    exchange, gather = (r.schedule for r in rounds("ring+sign") if not r.payload.exact)
    payload = 512 * 256 // 8
    for schedule in (exchange, gather):
        assert set(traffic(schedule, RACKS.cluster).sent.values()) == {payload * 7 // 8}
    [whole] = [r.schedule for r in rounds("ring+efsign") if not r.payload.exact]
    assert set(traffic(whole, RACKS.cluster).sent.values()) == {(payload + 4) * 7}


def test_averaged_parameters_are_added_or_gathered_so_that_the_mean_is_kept() -> None:
    compiled = rounds("dssync+int8")
    assert {r.schedule.name for r in compiled if not r.payload.exact} == {"all_gather"}
    assert {r.schedule.name for r in rounds("local_sgd(every=1)+fp16")} == {"ring"}


def test_rounds_are_numbered_and_groups_share_numbers() -> None:
    assert [r.number for r in rounds("ring+int8")] == [0, 1, 2]
    shuffled = rounds("dssync+int8")
    assert [r.number for r in shuffled] == [0, 0, 0, 1, 1, 1]
    labels = {(r.number, rank) for r in shuffled for rank in r.group.ranks}
    assert len(labels) == sum(r.group.size for r in shuffled)


def test_turns_are_taken_by_those_who_meet() -> None:
    """Meeting every fourth step, groups still rotate by one at each meeting."""
    plan = replace(parse_plan("dssync"), cadence=Cadence(every=4))
    pairs = Group.everybody(Cluster.regular([2, 2]))
    table = [
        [r.group.ranks for r in compile_step(plan, pairs, MATRIX, step).rounds]
        for step in range(3, 20, 4)
    ]
    assert table[:4] == [[(0, 2)], [(0, 1), (2, 3)], [(1, 3)], table[1]]


def test_cadence() -> None:
    assert [bool(rounds("local_sgd(every=3)", step)) for step in range(6)] == [
        False,
        False,
        True,
    ] * 2
    racks = [(0, 1, 2, 3), (4, 5, 6, 7)]
    alone = chains("local_sgd(every=2, levels=rack, delay=1)", 0)
    both = chains("local_sgd(every=2, levels=rack, delay=1)", 1)
    across = [chain for chain in both if chain.span is not None]
    for inside in (alone, both[: -len(across)]):
        assert [[r.group.ranks for r in chain.rounds] for chain in inside] == [[r] for r in racks]
        assert {(chain.delay, chain.span) for chain in inside} == {(0, None)}
    pairs = [[r.group.ranks for r in chain.rounds] for chain in across]
    assert pairs == [[(0, 4)], [(1, 5)], [(2, 6)], [(3, 7)]]
    quarter = (512 * 256 + 512) // 4
    assert [c.span for c in across] == [(i * quarter, (i + 1) * quarter) for i in range(4)]
    assert {c.delay for c in across} == {1}


def test_shuffled_groups_take_turns() -> None:
    even = Group.everybody(Cluster.regular([4, 4]))
    table = [[r.group.ranks for r in rounds("dssync", step, even)] for step in range(8)]
    assert table[0] == [(0, 4), (1, 2, 3), (5, 6, 7)]
    assert table[1] == [(1, 5), (0, 2, 3), (4, 6, 7)]
    assert table[:4] == table[4:]


def test_a_long_period_costs_nothing() -> None:
    group = Group.everybody(Cluster.regular([7, 11, 13, 17]))
    assert shuffle.choose_table(group).period == 7 * 11 * 13 * 17
    assert len(shuffle.groups(group, 12345)) == 5


@pytest.mark.parametrize(
    "rack_sizes",
    [[1], [2], [5], [2, 2], [2, 2, 2, 2], [1, 1, 1], [3, 2], [5, 3, 4], [1, 6], [4] * 4],
)
def test_shuffled_groups_divide_everybody_and_mix(rack_sizes: list[int]) -> None:
    group = Group.everybody(Cluster.regular(rack_sizes, interleaved=True))
    steps = [shuffle.groups(group, step) for step in range(shuffle.choose_table(group).period)]
    for groups in steps:
        met = [r for members in groups for r in members.ranks]
        assert len(met) == len(set(met))
        assert len(met) >= group.size - len(
            rack_sizes
        )  # nobody else is left for the last of a rack
    meetings = [members.ranks for groups in steps for members in groups]
    reached = {group.ranks[0]}
    for _ in group.ranks:
        reached |= {r for members in meetings if reached & set(members) for r in members}
    assert reached == set(group.ranks)


def test_gradient_coding_is_a_quorum() -> None:
    [round_] = rounds("gc(stragglers=1)", workload=Workload.of_size(Size.parse("4KB")))
    assert any(move.quorum for move in round_.schedule.moves(0))
    assert timeline(round_.schedule).sequential_moves < 2 * 7


def test_a_code_that_does_not_fit_is_refused() -> None:
    seven = Group.everybody(Cluster.flat(7))
    with pytest.raises(LayoutError, match="7 workers can't do without 7; use stragglers=6 or less"):
        rounds("gc(stragglers=7)", group=seven)
    rounds("gc(stragglers=6)", group=seven)


def test_a_coded_tree_has_a_quorum_at_every_parent() -> None:
    twenty = Group.everybody(Cluster.flat(20))
    small = Workload.of_size(Size.parse("4KB"))
    [round_] = rounds("codedreduce(fanout=4, stragglers=1)", group=twenty, workload=small)
    assert round_.schedule.name == "coded tree"
    decoding = [sum(m.quorum is not None for m in round_.schedule.moves(r)) for r in range(20)]
    chunks = len(round_.schedule.sizes)
    assert decoding == [chunks] * 5 + [0] * 15  # the root, on rank 0, and four workers


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("auto", "before it has chosen; name a plan"),
        ("asp", "no common rounds"),
        ("lgc(k=3)", "no common rounds: stragglers answer a step later; try gc"),
    ],
)
def test_plans_without_common_rounds_say_so(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        rounds(text)


def test_more_servers_than_workers() -> None:
    with pytest.raises(LayoutError, match="ps has 9 servers but only 8 workers; give servers=8 or"):
        rounds("ps(servers=9)")


def test_a_master_that_is_not_there() -> None:
    with pytest.raises(LayoutError, match="root 8 is not in the group"):
        rounds("star(root=8)")


def test_parameters_of_two_bytes_travel_as_float32() -> None:
    """And gradients as they are; a compressor decides for itself."""
    tensors = tuple(
        Tensor(name=dtype, shape=(64, 64), dtype=dtype)
        for dtype in ("bfloat16", "float16", "float32", "float64")
    )
    job = Workload(name="mixed", tensors=tensors)

    def sizes(text: str) -> set[int]:
        step = compile_step(parse_plan(text), Group.everybody(Cluster.flat(4)), job, 0)
        return {r.payload.itemsize for r in step.rounds}

    assert sizes("ring") == {2, 4, 8}
    assert sizes("local_sgd(every=1)") == {4, 8}
    assert sizes("local_sgd(every=1)+bf16") == {2}
