"""The request `auto`, which by itself is no plan that can run."""

from __future__ import annotations

from dataclasses import replace

from thalweg.catalog import parse_plan
from thalweg.declarations import Promise
from thalweg.plan import Plan

FIRST_AUTO_PLAN = "ring"


def is_auto(plan: Plan) -> bool:
    return plan.topology.name == "auto"


def allowed(plan: Plan) -> Promise:
    """The weakest promise that is acceptable."""
    return Promise(plan.topology.arguments["allow"])


def plan_at_first(plan: Plan) -> Plan:
    """The plan that runs until there is advice; the plan itself if it isn't `auto`."""
    return with_settings(parse_plan(FIRST_AUTO_PLAN), plan) if is_auto(plan) else plan


def with_settings(plan: Plan, requested: Plan) -> Plan:
    """The plan with the settings that `auto` was given."""
    settings = {**dict(plan.text.settings), **dict(requested.text.settings)}
    return parse_plan(str(replace(plan.text, settings=tuple(settings.items()))))
