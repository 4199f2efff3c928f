from __future__ import annotations

import re

from thalweg import errors
from thalweg.errors import ThalwegError


def test_the_tree_shows_every_error_below_its_base() -> None:
    drawn: list[tuple[int, str]] = []
    bases = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"([ │├└─]*)([A-Z]\w+)(?:  |$)", line)
        if found:
            depth = len(found[1])
            above = [name for further, name in drawn if further < depth]
            bases[found[2]] = above[-1] if above else "Exception"
            drawn = [(further, name) for further, name in drawn if further < depth]
            drawn.append((depth, found[2]))
    actual = {
        name: made.__bases__[0].__name__
        for name, made in vars(errors).items()
        if isinstance(made, type) and issubclass(made, ThalwegError)
    }
    assert bases == actual
