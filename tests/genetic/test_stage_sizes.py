"""SkipPipe's eq. 1."""

from __future__ import annotations

import pytest

from planner.genetic import stage_sizes_for_skip


@pytest.mark.parametrize(
    ("devices", "stages", "ratio", "sizes"),
    [
        (18, 4, 0.25, (6, 4, 4, 4)),
        (20, 6, 1 / 3, (5, 3, 3, 3, 3, 3)),
        (20, 6, 0.33, (5, 3, 3, 3, 3, 3)),
        (12, 4, 0.0, (3, 3, 3, 3)),
        (5, 1, 0.0, (5,)),
        (4, 4, 0.25, (1, 1, 1, 1)),
    ],
)
def test_sizes(devices: int, stages: int, ratio: float, sizes: tuple[int, ...]) -> None:
    """The paper's shapes, and the edges."""
    assert stage_sizes_for_skip(devices, stages, ratio) == sizes


def test_every_device_is_used_and_stage_zero_is_largest() -> None:
    """Sizes sum to the number of devices for any ratio that is allowed."""
    for devices in range(2, 40):
        for stages in range(2, min(devices, 9) + 1):
            for ratio in (0.0, 0.1, 0.3):
                sizes = stage_sizes_for_skip(devices, stages, ratio)
                assert sum(sizes) == devices
                assert min(sizes) >= 1
                assert sizes[0] == max(sizes)


@pytest.mark.parametrize("arguments", [(3, 4, 0.1), (8, 4, 0.75), (8, 4, -0.1), (8, 1, 0.5)])
def test_impossible_shapes_raise(arguments: tuple[int, int, float]) -> None:
    """Too few devices, or a ratio that empties the later stages."""
    with pytest.raises(ValueError, match=r"found|stage"):
        stage_sizes_for_skip(*arguments)
