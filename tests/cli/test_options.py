from __future__ import annotations

import pytest

from thalweg.cli.options import choice_line


@pytest.mark.parametrize(("measured", "suffix"), [(None, ""), (0.43, ", measured 430 ms")])
def test_a_choice_is_a_line(measured: float | None, suffix: str) -> None:
    chosen = {
        "step": 8,
        "sync": "hierarchical",
        "predicted": 0.41,
        "low": 0.39,
        "high": 0.44,
        "measured": measured,
        "reason": "200 ms less of transfers",
    }
    assert choice_line(chosen) == (
        f"from step 8: hierarchical: predicted 410 ms (390 ms to 440 ms){suffix} "
        "(200 ms less of transfers)"
    )
