"""The text form of plans: what is written is what is printed, and mistakes are explained."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import PlanError, UnsoundPlan
from thalweg.facts import Cluster, Tensor, Workload
from thalweg.plan import Cadence, Call, PlanText
from thalweg.schedules import Group
from thalweg.steps import compile_step, warm_up

EXAMPLES = [
    "ring",
    "hierarchical+powersgd(rank=4)",
    "codedreduce(fanout=4, stragglers=1)+fp16",
    "dssync+int8",
    "local_sgd(every=8)",
    "ring+fp16 @ bucket=4MB, transport=tcp",
    "ring+fp16 @ bucket=4MB, transport=zeromq",
    "ring+fp16 @ bucket=4096KB",
    "auto(allow=exact)",
    "hierarchical(form=leader)+topk(ratio=0.001, exact=true)",
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_parsing_then_printing_gives_the_same_text(text: str) -> None:
    assert str(parse_plan(text)) == text


@pytest.mark.parametrize("text", ["ring @ transport=c10d", "ddp @ bucket=1MB, transport=c10d"])
def test_a_transport_that_was_retired(text: str) -> None:
    line = "the transport c10d was retired, because it was slower than tcp; leave transport out"
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert str(caught.value) == line


def test_white_space_is_not_kept() -> None:
    assert str(parse_plan(" tree( fanout =4 )+fp16@bucket=4MB,transport=tcp ")) == (
        "tree(fanout=4)+fp16 @ bucket=4MB, transport=tcp"
    )
    assert str(parse_plan("ring()")) == "ring"


WORD = st.from_regex(r"[a-z0-9_.]{1,8}", fullmatch=True)
CALLS = st.builds(
    Call,
    WORD,
    st.lists(st.tuples(WORD, WORD), max_size=3, unique_by=lambda pair: pair[0]).map(tuple),
)
TEXTS = st.builds(
    PlanText,
    preset=CALLS,
    compressor=st.none() | CALLS,
    settings=st.lists(st.tuples(WORD, WORD), max_size=2, unique_by=lambda pair: pair[0]).map(tuple),
)


@given(TEXTS)
def test_any_text_form_is_read_as_it_is_printed(text: PlanText) -> None:
    assert PlanText.parse(str(text)) == text


@given(st.text(max_size=30))
def test_any_text_at_all_is_read_or_explained(text: str) -> None:
    with suppress(PlanError):  # any other error fails
        parse_plan(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "can't read the plan '' at character 1: a plan is missing; write it like"),
        ("ring+", "can't read the plan 'ring+' at character 6: a compressor is missing; write"),
        ("ring(", "can't read the plan 'ring(' at character 6: an argument is missing; write"),
        (
            "tree(fanout=2",
            "can't read the plan 'tree(fanout=2' at character 14: the bracket after t",
        ),
        ("tree(4)", "can't read the plan 'tree(4)' at character 7: an argument '4' has no value"),
        ("tree(fanout=2, fanout=3)", "can't read the plan"),
        (
            "ring; rm",
            "can't read the plan 'ring; rm' at character 5: ';' has no meaning here; write",
        ),
        (
            "ring ring",
            "can't read the plan 'ring ring' at character 6: 'ring' is not expected; wri",
        ),
        ("ring+fp16+int8", "can't read the plan 'ring+fp16+int8' at character 10: '+' is not exp"),
        ("rnig", "there is no plan 'rnig'; there are asp, auto"),
        ("ring+fp32", "there is no compressor 'fp32'; there are acpsgd"),
        ("ring(fanout=2)", "ring has no argument 'fanout'; it takes none"),
        ("tree(fanuot=2)", "tree has no argument 'fanuot'; it takes fanout (did you mean fanout?)"),
        ("tree(fanout=two)", "fanout of tree: 'two' is not a whole number; write a whole number"),
        ("tree(fanout=0)", "fanout of tree: 0 is too small; give at least 1"),
        ("ring+topk(ratio=2)", "ratio of topk: 2 is too large; give at most 1"),
        ("ring+topk(ratio=nan)", "ratio of topk: 'nan' is not a number; write a number"),
        (
            "ring+topk(exact=perhaps)",
            "exact of topk: 'perhaps' is not true or false; write true or false",
        ),
        (
            "hierarchical(form=flat)",
            "form of hierarchical: flat is not a choice; use parallel or l",
        ),
        ("gc(code=reed)", "there is no code 'reed'; there are cyclic, cyclic_mds and fractional"),
        ("ring @ bucket=4", "bucket of @: '4' is not a size; write it like 25MB (units: B, KB"),
        ("ring @ speed=4", "@ has no argument 'speed'; it takes bucket, transport and overlap"),
    ],
)
def test_mistakes_are_explained(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert str(caught.value).startswith(message)


def test_capitals_in_names_are_no_mistake() -> None:
    assert str(parse_plan("DDP")) == "ddp"
    assert str(parse_plan("Hierarchical+PowerSGD(rank=4)")) == "hierarchical+powersgd(rank=4)"


def test_a_compressor_alone_is_no_plan() -> None:
    with pytest.raises(
        PlanError, match=r"powersgd is a compressor.*write.* ring\+powersgd\(rank=2"
    ):
        parse_plan("powersgd(rank=2)")


def test_a_near_miss_is_guessed() -> None:
    with pytest.raises(PlanError, match=r"did you mean ring\?"):
        parse_plan("rnig")


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        (
            "codedreduce+int8",
            "not the weighted sum of int8",
            "use bf16, fp16, randomblock or randomk",
        ),
        (
            "gc+powersgd",
            "not the weighted sum of powersgd",
            "use bf16, fp16, randomblock or randomk",
        ),
        ("gc+randomk(feedback=true)", "would keep different residuals", "leave feedback out"),
        ("dssync+topk", "groups that change can't make up for it", "use bf16, fp16, int8, qsgd or"),
        ("local_sgd+sign", "groups that change can't make up for it", "use bf16, fp16, int8, qsgd"),
        ("gossip+int8", "int8's can't be added", "use bf16 or fp16"),
        ("asp+powersgd", "takes gradients uncompressed", "leave +powersgd out"),
        ("asp+fp16", "takes gradients uncompressed", "leave +fp16 out"),
        ("lgc(k=3)+acpsgd", "needs all ranks at the same step", "use bf16, dgc, efsign, fp16"),
        ("ddp @ transport=tcp", "own collective can't run over tcp", "leave transport out"),
        ("ddp @ transport=zeromq", "the backend's own collective", "leave transport out"),
        ("auto+fp16", "auto chooses the compressor itself", "write auto(allow=lossy)"),
    ],
)
def test_unsound_combinations_say_why(text: str, reason: str, remedy: str) -> None:
    with pytest.raises(UnsoundPlan) as caught:
        parse_plan(text)
    assert reason in caught.value.problem
    assert remedy in caught.value.remedy


def test_every_compressor_with_every_exact_topology_is_sound() -> None:
    catalog = default_catalog()
    for name, topology in catalog.topologies.items():
        for compressor in catalog.compressors:
            if not topology.mixes:
                parse_plan(f"{name}+{compressor}")


def test_a_compressor_needs_no_argument_of_the_run() -> None:
    signs = replace(default_catalog().compressors["efsign"], name="signs", parameters={})
    catalog = default_catalog().with_compressor(signs)
    assert warm_up(catalog.plan("ring+signs")) == 0
    group = Group.everybody(Cluster.flat(3))
    workload = Workload(name="one", tensors=(Tensor(name="w", shape=(64, 64)),))
    plan = catalog.plan("ring+signs")
    [chain] = compile_step(plan, group, workload, 0, catalog).chains
    assert chain.encoded
    with pytest.raises(UnsoundPlan, match="a code adds weighted messages"):
        catalog.plan("gc+signs")


def test_codes_combine_with_exactly_these() -> None:
    sound = []
    for compressor in default_catalog().compressors:
        try:
            parse_plan(f"codedreduce+{compressor}")
            sound.append(compressor)
        except UnsoundPlan:
            pass
    assert sorted(sound) == ["bf16", "fp16", "randomblock", "randomk"]


def test_presets_are_points_among_the_five_choices() -> None:
    coded = parse_plan("codedreduce(fanout=4, stragglers=2)")
    assert str(coded.topology) == "tree(fanout=4)"
    assert str(coded.redundancy) == "fractional(stragglers=2, root=worker, beyond=wait)"
    assert parse_plan("umw").topology == parse_plan("star").topology
    assert parse_plan("ddp").topology == parse_plan("native").topology
    assert str(parse_plan("dssync").what) == "parameters(optimizer=local)"
    local = parse_plan("local_sgd(every=4, levels=rack, delay=1)")
    assert local.cadence == Cadence(every=4, inside=True, delay=1)
    assert parse_plan("asp(staleness=2)").cadence.staleness == 2


def test_a_plan_can_be_a_key() -> None:
    plans = {parse_plan(text): text for text in EXAMPLES}
    assert plans[parse_plan("local_sgd(every=8)")] == "local_sgd(every=8)"


def test_plans_are_equal_by_what_they_mean() -> None:
    assert parse_plan("tree(fanout=2)") == parse_plan("tree")
    assert parse_plan("ring @ bucket=4MB") == parse_plan("ring @ bucket=4000KB")
    assert parse_plan("tree(fanout=3)") != parse_plan("tree")


@pytest.mark.parametrize(
    ("text", "promise"),
    [
        ("ring", "exact"),
        ("gc", "exact"),
        ("gc+fp16", "lossy"),
        ("ring+fp16", "lossy"),
        ("lgc(k=3)", "lossy"),
        ("asp", "lossy"),
        ("dssync", "eventual"),
        ("auto", "exact"),
        ("auto(allow=eventual)", "eventual"),
        ("local_sgd+fp16", "eventual"),
    ],
)
def test_promises(text: str, promise: str) -> None:
    assert default_catalog().guarantee(parse_plan(text)).promise.value == promise
