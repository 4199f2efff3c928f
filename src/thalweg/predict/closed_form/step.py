"""A step in closed form, for clusters that are too large to simulate.

Nothing is compiled and no link is counted: 100,000 workers take as long as a hundred. Uneven
clusters are taken for even ones with their largest rack, slowest NIC and slowest uplink. Each
bucket's exchange takes the seconds of its form (`topologies.py`), in the optimal number of chunks;
buckets follow one another on the links: bucket b begins when it is ready and b-1 has ended, so the
last one is exposed.

    T = forward + max{ backward, end of the last bucket } + encode + decode + optimizer

Encoding and decoding add to backward, as on one device. Stragglers cost the expected maximum of
their delays, as if all ranks waited for all.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from thalweg.catalog import Catalog
from thalweg.compress import Compressor, Payload
from thalweg.errors import PlanError
from thalweg.facts import CodecCost, Machine, TransportCosts, Workload
from thalweg.plan import Plan
from thalweg.predict.closed_form import topologies as forms
from thalweg.predict.closed_form.symbols import Cost, Symbols
from thalweg.predict.compiled_step import codec_cost
from thalweg.predict.estimate import Breakdown
from thalweg.predict.straggler_recurrence import expected_latest
from thalweg.schedules import Group
from thalweg.schedules.topologies.hierarchical import COMPRESS_BETWEEN
from thalweg.steps import warm_up

UNPIPELINED_TOPOLOGIES = ("halving_doubling",)  # their chunks don't overlap


def closed_form_breakdown(
    plan: Plan,
    group: Group,
    workload: Workload,
    transport: TransportCosts,
    machine: Machine,
    catalog: Catalog,
) -> Breakdown:
    """The breakdown of a step; PlanError for plans without a closed form."""
    cadence, costs = plan.cadence, workload.costs
    form, _ = forms.form_of(plan.topology.name, plan.topology.arguments, group)
    needs_simulation = (
        plan.redundancy is not None or cadence.staleness is not None or cadence.two_levels
    )
    if form is None or needs_simulation:
        raise PlanError(
            f"{plan} has no closed form, and {group.size} workers are too many to simulate",
            "predict it for fewer workers",
        )
    x = _symbols(group, transport)
    rack, leaders = replace(x, N=x.G, C=1), replace(x, N=x.C, G=1)
    between = plan.topology.arguments.get("compress") == COMPRESS_BETWEEN and x.C > 1
    scopes = [leaders if between else x]
    if plan.topology.name == "shuffle":  # one rank of each rack, concurrent with the others
        rest = replace(rack, N=x.G - 1, G=x.G - 1)
        scopes = [leaders, rest] if x.G > 1 else [leaders]
    codec, _ = codec_cost(plan.precision, machine)
    compressor = catalog.compressors[plan.precision.name] if plan.precision else None
    concurrent = [_ExchangeForms(scope, form, plan, compressor, codec) for scope in scopes]
    in_racks = _ExchangeForms(rack, form, plan, compressor, codec)
    chain = forms.chain(replace(rack, S=1.0))
    total = end = encode = decode = 0.0
    for bucket in workload.buckets(plan.settings.bucket):
        payloads = [Payload("values", bucket.elements, bucket.itemsize, exact=True)]
        if compressor is not None and plan.precision is not None:
            arguments = plan.precision.arguments
            payloads = compressor.payloads(bucket.tensors, warm_up(plan), **arguments)
        exchanges = [[scope.exchange(each) for scope in concurrent] for each in payloads]
        seconds = sum(max(seconds for seconds, _ in each) for each in exchanges)
        if between:
            seconds += 2 * _seconds(chain, bucket.nbytes, is_cut=True)
        if cadence.inside:  # at the other steps
            seconds += (cadence.every - 1) * sum(in_racks.exchange(each)[0] for each in payloads)
        total += seconds
        end = max(end, bucket.ready_seconds) + seconds
        encode += codec.bucket.value + codec.encode.value * bucket.elements
        decode += max(each for scope in exchanges for _, each in scope) * bucket.elements
    compute = costs.forward.seconds + costs.backward.seconds + costs.optimizer.seconds
    if plan.averages_parameters:
        hidden = cadence.delay * compute  # by the steps until the result is applied
        exposed = max(0.0, total - hidden) / cadence.every
    else:
        exposed = max(0.0, end - costs.backward.seconds)
    every = 1 if cadence.inside else cadence.every  # racks compress in between, too
    return Breakdown(
        compute=compute,
        encode=encode / every,
        decode=decode / every,
        transfer=exposed,
        waiting=expected_latest([group.cluster.host(rank).late for rank in group.ranks]),
    )


def _seconds(of_byte: Cost, nbytes: float, *, is_cut: bool = False) -> float:
    """The seconds of a form from those of one byte: affine in bytes, but for the number of chunks
    where they are cut, which grows with their square root."""
    exposed, chunks = of_byte.transfer - of_byte.busiest, 1.0
    if is_cut and of_byte.each > 0:
        chunks = max(1.0, sqrt(exposed * nbytes / of_byte.each))
    latency = of_byte.latency + (chunks - 1) * of_byte.each
    return latency + nbytes * (of_byte.busiest + exposed / chunks)


class _ExchangeForms:
    """The ways in which a group exchanges payloads; `form` is that of its all-reduce."""

    def __init__(
        self,
        x: Symbols,
        form: forms.ClosedForm,
        plan: Plan,
        compressor: Compressor | None,
        codec: CodecCost,
    ) -> None:
        self._size = x.N
        self._plan = plan
        self._compressor = compressor
        self._codec = codec
        ways = (form, forms.all_gather, forms.all_to_all)
        self._reduce, self._gather, self._scatter = (way(replace(x, S=1.0)) for way in ways)

    def exchange(self, payload: Payload) -> tuple[float, float]:
        """The seconds of the exchange, and those per element to decode its result."""
        codec, compressor, nbytes = self._codec, self._compressor, payload.nbytes
        if payload.exact or compressor is None or compressor.summable:
            is_cut = self._plan.topology.name not in UNPIPELINED_TOPOLOGIES
            return _seconds(self._reduce, nbytes, is_cut=is_cut), codec.decode.value
        gathered = _seconds(self._gather, self._size * nbytes)
        two_shots = _seconds(self._scatter, nbytes) + _seconds(self._gather, nbytes)
        is_sharded = compressor.elementwise and not self._plan.averages_parameters
        if is_sharded and two_shots < gathered:
            return two_shots, codec.decoding_shards
        return gathered, codec.decoding(self._size, always=not compressor.elementwise)


def _symbols(group: Group, costs: TransportCosts) -> Symbols:
    """The symbols with the rates that one flow reaches, and the per-message cost in alpha."""
    x, share = Symbols.of(group, 1.0), costs.bandwidth_share(1)
    return replace(
        x,
        alpha=x.alpha + costs.message.value,
        beta1=max(x.beta1 / share, costs.byte.value),
        beta2=x.beta2 / share,
    )
