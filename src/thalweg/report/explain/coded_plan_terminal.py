"""A coded tree for the terminal: parents with their children, and the work of each.

Replicas compute the same parts, and so do their children: a line is a *place* of the tree with all
workers in it, team by team, each team under another parent. Where every worker computes other
parts a line is a worker, and of large trees one branch is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Group as Block
from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from thalweg.codes import TREE_ROOT
from thalweg.report.explain.coded_plan import CodedPlanView, needs_text, root_text
from thalweg.report.tables import named

INDENT = 4  # of a layer, in rich's trees
MAX_TREE_LINES = 40
FIRST_SHOWN_CHILDREN, LAST = 6, 2  # where there are too many
MAX_TEAMS_PER_LINE = 8
Teams = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _TreeRow:
    label: str
    work: str
    style: str = ""
    below: list[_TreeRow] = field(default_factory=list)

    def width(self, depth: int = 0) -> int:
        return max(INDENT * depth + len(self.label), *(b.width(depth + 1) for b in self.below), 0)


def coded_tree(view: CodedPlanView) -> RenderableType:
    lines = _places(view, ((TREE_ROOT,),)) if view.plain else _workers(view, TREE_ROOT, _few(view))
    column = max([line.width(1) for line in lines], default=0) + 2
    tree = Tree(root_text(view), guide_style="dim")
    _hang(tree, lines, 1, column)
    of = f"of {view.batch} samples" if view.batch is not None else "of the batch"
    title = Text(f"\nTree of workers, and the part {of} that each computes", style="bold")
    return Block(title, tree, Text(_legend(view), style="dim"), Text(""), named(view.facts()))


def _few(view: CodedPlanView) -> bool:
    return len(view.allocation.workers) <= MAX_TREE_LINES


def _hang(tree: Tree, lines: list[_TreeRow], depth: int, column: int) -> None:
    for line in lines:
        text = Text(line.label, style=line.style)
        text.append(" " * (column - INDENT * depth - len(line.label)) if line.work else "")
        text.append(line.work, style="cyan")
        _hang(tree.add(text), line.below, depth + 1, column)


def _places(view: CodedPlanView, teams: Teams) -> list[_TreeRow]:
    """The places below one: the first team of all its workers, then the second, and so on."""
    parents = [parent for team in teams for parent in team]
    filled = list(zip(*([q.members for q in view.quotas(p)] for p in parents), strict=True))
    return _shortened(
        [
            _TreeRow(_teams_text(place), view.work(place[0][0]), "bold", _places(view, place))
            for place in filled
        ],
        len(filled) <= MAX_TREE_LINES,
    )


def _shortened(lines: list[_TreeRow], everything: bool) -> list[_TreeRow]:
    left = len(lines) - FIRST_SHOWN_CHILDREN - LAST
    if everything or left <= 0:
        return lines
    return [*lines[:FIRST_SHOWN_CHILDREN], _TreeRow(f"... {left} more", ""), *lines[-LAST:]]


def _teams_text(teams: Teams) -> str:
    if len(teams) > MAX_TEAMS_PER_LINE:
        *some, last = map(_team_text, [*teams[: MAX_TEAMS_PER_LINE // 2], teams[-1]])
        return f"{' | '.join(some)} | ... | {last}  ({len(teams)} teams)"
    return " | ".join(map(_team_text, teams))


def _team_text(team: tuple[int, ...]) -> str:
    in_a_row = team == tuple(range(team[0], team[0] + len(team)))
    return f"{team[0]}-{team[-1]}" if in_a_row and len(team) > 2 else " ".join(map(str, team))


def _workers(view: CodedPlanView, node: int, everybody: bool) -> list[_TreeRow]:
    children = view.allocation.tree.children[node]
    lines = [_worker(view, child, everybody, first=child == children[0]) for child in children]
    return _shortened(lines, everybody)


def _worker(view: CodedPlanView, rank: int, everybody: bool, first: bool) -> _TreeRow:
    line = _TreeRow(str(rank), view.work(rank), "bold")
    below = view.below(rank)
    if below and (everybody or first):
        line.label += f" + {needs_text(view, rank)}"
        line.below = _workers(view, rank, everybody)
    elif below:
        line.label += f" + {needs_text(view, rank)}, {below} below likewise"
    return line


def _legend(view: CodedPlanView) -> str:
    if not view.plain:
        unless = "" if _few(view) else "\nOne branch is shown; --json has all."
        return (
            "A line is a worker and its parts, x their weight unless one; + the answers that it "
            f"needs from below.{unless}"
        )
    if all(len(quota.members) == 1 for quota in view.quotas(TREE_ROOT)):
        return "A line is a worker and its parts."
    text = (
        "A line is a part of the batch and the workers that compute it: one of each team suffices."
    )
    if view.allocation.tree.depth == 1:
        return text
    return f"{text}\n| separates teams, each with another parent on the line above."
