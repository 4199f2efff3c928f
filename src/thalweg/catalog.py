"""The catalog of topologies, codes, compressors and presets, and the rules for combining them.

Parts are found in their folders, where a module with a `TOPOLOGY`, `CODE` or `COMPRESSOR` is
enough, and in other installed packages (`discovery`). A `Catalog` is a value;
`with_topology`, `with_compressor` and `with_code` return a larger one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import thalweg.codes
import thalweg.compress
import thalweg.schedules.topologies
from thalweg.codes import CodeFamily
from thalweg.compress import Compressor
from thalweg.declarations import Parameter, Promise, Variant, fill_defaults, listed, nearest
from thalweg.discovery import InstalledPart, by_name, declared, installed_parts
from thalweg.errors import PlanError, UnsoundPlan
from thalweg.facts import Size
from thalweg.plan import TRANSPORT, Cadence, Call, Choice, Plan, PlanText, Settings
from thalweg.presets import AVERAGED_PARAMETERS, PRESETS, Preset, averaged
from thalweg.schedules import Topology

log = logging.getLogger("thalweg")

PACKAGE_NAME = "thalweg"
COMPENSATE = "compensate"  # redundancy without a code: late gradients are added a step later
SETTING_PARAMETERS = {
    "bucket": Parameter(
        kind=Size, default=Settings().bucket, help="size of the gradients that are sent together"
    ),
    "transport": Parameter(
        kind=str,
        default=None,
        choices=(TRANSPORT, "zeromq"),
        help="transport of the payloads: tcp, also under its former name zeromq",
    ),
    "overlap": Parameter(
        kind=bool, default=None, help="compress while backward runs; chosen by a trial if absent"
    ),
}


@dataclass(frozen=True, slots=True)
class Guarantee:
    """The promise of a plan, the consequence of a straggling or dead worker, and whether its
    connections can be authenticated and encrypted, which torch's own can't."""

    promise: Promise
    result: str
    late: str
    dead: str
    protected: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """All parts by name. `origins` are the packages of those that other packages bring, and
    `refused` the reasons why some of theirs can't be used, by kind and name."""

    topologies: dict[str, Topology]
    codes: dict[str, CodeFamily]
    compressors: dict[str, Compressor]
    presets: dict[str, Preset]
    origins: Mapping[tuple[str, str], str] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def with_topology(self, topology: Topology) -> Catalog:
        return replace(
            self,
            topologies=by_name([*self.topologies.values(), topology]),
            presets=by_name([*self.presets.values(), _preset_of(topology)]),
        )

    def with_compressor(self, compressor: Compressor) -> Catalog:
        return replace(self, compressors=by_name([*self.compressors.values(), compressor]))

    def with_code(self, code: CodeFamily) -> Catalog:
        return replace(self, codes=by_name([*self.codes.values(), code]))

    def with_installed(self, found: InstalledPart) -> Catalog:
        """The catalog with a part of another package, or with the reason why it can't be used."""
        key = found.kind, found.name
        problem = found.problem or self._clash(found)
        if problem:
            return replace(self, refused={**self.refused, key: f"{problem} ({found.origin})"})
        larger: Catalog = getattr(self, f"with_{found.kind}")(found.part)
        return replace(larger, origins={**self.origins, key: found.origin})

    def _clash(self, found: InstalledPart) -> str:
        """The clash of a part's name with another, which stays; empty if there is none."""
        owners = [
            self.origin(kind, found.name)
            for kind, names in (
                (("code", {*self.codes, COMPENSATE}),)
                if found.kind == "code"
                else (("plan", self.presets), ("compressor", self.compressors))
            )
            if found.name in names
        ]
        return f"{owners[0]} has a part of this name, too" if owners else ""

    def origin(self, kind: str, name: str) -> str:
        """The package that brings a part; topologies are plans, too."""
        return self.origins.get(("topology" if kind == "plan" else kind, name), PACKAGE_NAME)

    @property
    def variants(self) -> list[Variant]:
        """The plans that advice tries, in the order of their places."""
        parts: list[Preset | CodeFamily] = [*self.presets.values(), *self.codes.values()]
        tried = [
            variant
            for part in parts
            for variant in ((Variant(text=part.name),) if part.variants is None else part.variants)
        ]
        return sorted(tried, key=lambda variant: variant.place)

    def packages(self, plan: Plan) -> str:
        """The packages that bring parts of this plan, besides Thalweg itself."""
        kinds = zip(
            ("topology", "compressor", "code"),
            (plan.topology, plan.precision, plan.redundancy),
            strict=True,
        )
        origins = (self.origins.get((kind, choice.name)) for kind, choice in kinds if choice)
        return ", ".join(dict.fromkeys(origin for origin in origins if origin))

    def plan(self, text: str) -> Plan:
        """The plan that a text like `ring+fp16 @ bucket=4MB` stands for; PlanError if the text is
        malformed, names unknown parts, or combines parts that don't fit."""
        written = PlanText.parse(text)
        if written.preset.name in self.compressors:
            raise PlanError(
                f"{written.preset.name} is a compressor, not a plan",
                f"write the plan first: ring+{written.preset}",
            )
        preset = self._part(written.preset, self.presets, "plan")
        values = fill_defaults(preset.name, written.preset.arguments, preset.parameters)
        refuse_retired(dict(written.settings).get("transport"))
        settings: dict[str, Any] = fill_defaults("@", written.settings, SETTING_PARAMETERS)
        plan = Plan(
            text=written,
            precision=self._precision(written.compressor),
            settings=Settings(**settings),
            **preset.choose(values),
        )
        parts = {*self.codes, COMPENSATE}
        if plan.redundancy is not None and plan.redundancy.name not in parts:
            self._part(Call(plan.redundancy.name), self.codes, "code")
        for reason, remedy in self._objections(plan):
            raise UnsoundPlan(f"{plan} is unsound: {reason}", remedy)
        return plan

    def guarantee(self, plan: Plan) -> Guarantee:
        return replace(self._promised(plan), protected=not self.is_native(plan))

    def is_native(self, plan: Plan) -> bool:
        """True if the backend's own collective runs the plan. Thalweg runs compressed plans itself,
        in the same rounds."""
        topology = self.topologies.get(plan.topology.name)
        return topology is not None and topology.backend and plan.precision is None

    def _promised(self, plan: Plan) -> Guarantee:
        if plan.topology.name == "auto":
            return Guarantee(
                Promise(plan.topology.arguments["allow"]),
                "at least the promise of the chosen plan",
                late="as under the chosen plan",
                dead="as under the chosen plan",
            )
        lossy = plan.precision is not None
        promise = Promise.LOSSY if lossy else Promise.EXACT
        often = f"every {plan.cadence.every} steps" if plan.cadence.every > 1 else "every step"
        if plan.averages_parameters:
            topology = self.topologies[plan.topology.name]
            return Guarantee(
                Promise.EVENTUAL,
                "replicas differ, their mean is preserved" + (" up to rounding" if lossy else ""),
                "only its group waits for it"
                if topology.mixes
                else f"all ranks wait for it, {often}",
                "its group continues without it"
                if topology.mixes
                else "the others form a new group",
            )
        if plan.cadence.staleness is not None:
            return Guarantee(
                Promise.LOSSY,
                f"each gradient is a step; workers at most {plan.cadence.staleness} steps apart",
                f"no rank waits for it until it is {plan.cadence.staleness} steps behind",
                "its gradient is dropped and reported",
            )
        if plan.redundancy is not None and plan.redundancy.name in self.codes:
            stragglers = plan.redundancy.arguments["stragglers"]
            tolerated = "some" if stragglers is None else stragglers
            partial = plan.redundancy.arguments["beyond"] == "partial"
            return Guarantee(
                Promise.LOSSY if partial else promise,
                f"the sum over all samples; tolerated stragglers per parent: {tolerated}"
                + (", beyond it the answers that arrived, scaled up" if partial else ""),
                "no rank waits for it, unless it is the root",
                "no rank waits for it, unless it is the root; it may rejoin",
            )
        if plan.redundancy is not None:
            return Guarantee(
                Promise.LOSSY,
                "the mean of the fastest workers; the others' gradients one step later",
                "no rank waits for it",
                "its gradient is dropped and reported",
            )
        return Guarantee(
            promise,
            "the mean, up to the compressor's error" if lossy else "the exact mean",
            "all ranks wait for it",
            "the others form a new group and repeat the step; none is lost",
        )

    def _precision(self, call: Call | None) -> Choice | None:
        if call is None:
            return None
        compressor = self._part(call, self.compressors, "compressor")
        values = fill_defaults(compressor.name, call.arguments, compressor.parameters)
        return Choice.of(compressor.name, values)

    def _part(self, call: Call, names: dict[str, Any], kind: str) -> Any:
        """The part that a plan names; PlanError if there is none of this kind and name."""
        if call.name in names:
            return names[call.name]
        problem = self.refused.get(("topology" if kind == "plan" else kind, call.name))
        if problem:
            raise PlanError(
                f"the {kind} {call.name} can't be used: {problem}",
                "repair that package or uninstall it",
            )
        raise PlanError(
            f"there is no {kind} {call.name!r}",
            f"there are {listed(sorted(names))}{nearest(call.name, names)}; if another package "
            "brings it, install that on this host, as on all others",
        )

    def _objections(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """The reasons why the choices of a plan don't fit together, each with a remedy."""
        topology = self.topologies.get(plan.topology.name)
        named, redundancy = plan.settings.transport, plan.redundancy
        code = self.codes.get(redundancy.name) if redundancy is not None else None
        beyond = redundancy.arguments.get("beyond") if redundancy is not None else None
        between = plan.topology.arguments.get("compress") == "between"
        partial = [name for name, other in sorted(self.codes.items()) if other.partial]
        yield from _that_hold(
            (
                self.is_native(plan) and named is not None,
                f"the backend's own collective can't run over {named}",
                "leave transport out",
            ),
            (
                code is not None and beyond == "partial" and code.name not in partial,
                f"under code={code and code.name} some workers' answers are no part of the sum",
                f"use code={listed(partial, 'or')}, or beyond=wait or raise",
            ),
            (
                plan.precision is None and between,
                "there is nothing to compress between racks",
                "add a compressor, like +int8",
            ),
        )
        if plan.precision is None:
            return
        compressor, arguments = self.compressors[plan.precision.name], plan.precision.arguments
        name, coded, late = compressor.name, code is not None, redundancy is not None and not code
        yield from _that_hold(
            (
                plan.topology.name == "auto",
                "auto chooses the compressor itself",
                "write auto(allow=lossy)",
            ),
            (
                plan.cadence.two_levels,
                "averages between racks that are applied later aren't compressed",
                f"leave delay out, or +{name}",
            ),
            (
                plan.cadence.staleness is not None,
                "an asynchronous parameter server takes gradients uncompressed",
                f"leave +{name} out",
            ),
            (
                redundancy is not None and bool(arguments.get("warmup")),
                "workers that don't wait for stragglers have no common first steps",
                "leave warmup out",
            ),
            (
                coded and not compressor.linear,
                f"a code adds weighted messages, and {name} of a weighted sum is not the weighted "
                f"sum of {name}",
                f"with a code use {listed(self._names(linear=True), 'or')}",
            ),
            (
                coded and bool(arguments.get("feedback")),
                "workers that compute the same samples would keep different residuals",
                "with a code leave feedback out",
            ),
            (
                late and compressor.in_step,
                f"{name} needs all ranks at the same step, and this plan adds late gradients too",
                f"use {listed(self._names(in_step=False), 'or')}",
            ),
            (
                late and not compressor.linear,
                f"late gradients are added up, and payloads of {name} can't be",
                f"use {listed(self._names(linear=True, in_step=False), 'or')}",
            ),
            (
                plan.averages_parameters and compressor.biased,
                f"{name} leaves out most of a parameter, and groups that change can't make up for "
                "it by error feedback",
                f"to average parameters use {listed(self._names(biased=False), 'or')}",
            ),
            (
                topology is not None
                and topology.mixes
                and not topology.groups
                and not compressor.summable,
                f"{plan.topology.name} adds neighbours' payloads, and {name}'s can't be added",
                f"use {listed(self._names(summable=True, biased=False), 'or')}",
            ),
        )

    def _names(self, **wanted: bool) -> list[str]:
        return [
            name
            for name, compressor in sorted(self.compressors.items())
            if all(getattr(compressor, key) is value for key, value in wanted.items())
        ]


def _that_hold(*rules: tuple[bool, str, str]) -> Iterator[tuple[str, str]]:
    """The objections, each a reason and a remedy, whose condition is true."""
    return ((reason, remedy) for holds, reason, remedy in rules if holds)


@cache
def default_catalog() -> Catalog:
    """The catalog of the parts that come with Thalweg, and of those of other installed packages."""
    topologies = declared(thalweg.schedules.topologies, "TOPOLOGY")
    presets = [*map(_preset_of, topologies.values()), *PRESETS]
    catalog = Catalog(
        topologies=topologies,
        codes=declared(thalweg.codes, "CODE"),
        compressors=declared(thalweg.compress, "COMPRESSOR"),
        presets=by_name(presets),
    )
    types = {"topology": Topology, "compressor": Compressor, "code": CodeFamily}
    for found in installed_parts(types):
        catalog = catalog.with_installed(found)
    if os.environ.get("RANK", "0") == "0":  # one of a job's processes is enough
        for key, problem in catalog.refused.items():
            reason = f"{problem}; repair that package or uninstall it"
            log.warning("the %s %s can't be used: %s", *key, reason)
    return catalog


def parse_plan(text: str, catalog: Catalog | None = None) -> Plan:
    """The plan that a text like `ring+fp16 @ bucket=4MB` stands for; PlanError if the text is
    malformed, names unknown parts, or combines parts that don't fit."""
    return (catalog or default_catalog()).plan(text)


def refuse_retired(transport: str | None) -> None:
    """Raise PlanError for a transport of earlier versions that old plans may name."""
    if transport == "c10d":
        raise PlanError(
            "the transport c10d was retired, because it was slower than tcp", "leave transport out"
        )


def _preset_of(topology: Topology) -> Preset:
    def choose(values: dict[str, Any]) -> dict[str, Any]:
        own = {name: values[name] for name in topology.parameters}
        chosen: dict[str, Any] = {"topology": Choice.of(topology.name, own)}
        if topology.mixes:
            chosen |= {"what": averaged(values), "cadence": Cadence(delay=values["delay"])}
        return chosen

    return Preset(
        name=topology.name,
        summary=topology.summary,
        parameters={**topology.parameters, **(AVERAGED_PARAMETERS if topology.mixes else {})},
        choose=choose,
        variants=topology.variants,
    )
