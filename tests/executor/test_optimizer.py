"""Learning rates and groups of weight decay, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner.executor.runtime.optimizer import LRSchedule, OptimizerConfig

torch = pytest.importorskip("torch")


def test_rates_rise_and_fall() -> None:
    """Four steps of warm-up, then half a wave down to a tenth, and no further."""
    cosine = OptimizerConfig(
        1.0, schedule=LRSchedule.COSINE, warmup=4, schedule_steps=8, min_lr_ratio=0.1
    )
    half = 0.1 + 0.9 / 2
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, None, half, None, 0.1, 0.1]
    for step, want in enumerate(expected):
        if want is not None:
            assert cosine.lr_at(step) == pytest.approx(want)
    assert 1 > cosine.lr_at(5) > half > cosine.lr_at(7) > 0.1
    constant = OptimizerConfig(2.0, warmup=2)
    assert [constant.lr_at(step) for step in (0, 1, 2, 99)] == [1.0, 2.0, 2.0, 2.0]


def test_matrices_alone_decay() -> None:
    """With gradients of zero, AdamW does nothing but decay."""
    matrix, norm = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (3,)))
    settings = OptimizerConfig(0.5, weight_decay=0.2, warmup=2)
    optimizer = settings.make([matrix, norm])
    for parameter in (matrix, norm):
        parameter.grad = torch.zeros_like(parameter)
    for step in range(2):
        settings.set_lr(optimizer, step)
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 3), (1 - 0.05) * (1 - 0.1)))
    torch.testing.assert_close(norm.detach(), torch.ones(3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "linear"}, "schedule 'linear' is unknown; choose one of constant, cosine"),
        ({"schedule": "cosine", "warmup": 5, "schedule_steps": 5}, "more steps than its warm-up"),
        ({"warmup": -1}, "warmup is -1; it must be a whole number of at least 0"),
        ({"beta2": 1.0}, "beta2 is 1; it must be below 1"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio is 1.5; it must be at most 1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ],
)
def test_wrong_settings_are_one_line(wrong: dict[str, Any], message: str) -> None:
    """Which, its value, what it must be."""
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**wrong)


def test_steps_of_a_schedule_say_nothing_where_rates_are_constant() -> None:
    """A run that goes on for longer than it was to has the same settings."""
    assert OptimizerConfig(schedule_steps=10) == OptimizerConfig(schedule_steps=20)
