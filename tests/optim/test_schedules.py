"""Oracles: the closed forms, written out a second way, at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.optim.schedules import Schedule, horizon_free, lr_multiplier

runs = st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 30))  # warm-up, constant, decay
floors = st.sampled_from([0.0, 0.1])
DECAYING = ("linear", "cosine", "wsd", "wsd_sqrt")
CYCLE = 7


def whole_run(schedule: Schedule, run: tuple[int, int, int], floor: float) -> list[float]:
    warmup, constant, decay = run
    horizon = warmup + constant + decay
    return [
        lr_multiplier(
            s, schedule=schedule, warmup=warmup, horizon=horizon, decay=decay, floor=floor, cycle=CYCLE
        )
        for s in range(horizon)
    ]


def falling(length: int, floor: float, shape: Callable[[float], float]) -> list[float]:
    """`length` steps down: the elapsed part ends at 1 with a floor, and one notch before 1 without."""
    notches = length if floor else length + 1
    return [floor + (1 - floor) * shape(k / notches) for k in range(1, length + 1)]


@settings(max_examples=50)
@given(run=runs, floor=floors)
def test_every_schedule_equals_its_closed_form_at_every_step(run, floor: float) -> None:
    warmup, constant, decay = run
    after = constant + decay
    rising = [k / warmup for k in range(1, warmup + 1)]
    expected = {
        "constant": [1.0] * after,
        "linear": falling(after, floor, lambda t: 1 - t),
        "cosine": falling(after, floor, lambda t: (1 + math.cos(math.pi * t)) / 2),
        "wsd": [1.0] * constant + falling(decay, floor, lambda t: 1 - t),
        "wsd_sqrt": [1.0] * constant + falling(decay, floor, lambda t: 1 - math.sqrt(t)),
        "inverse_sqrt": [
            floor + (1 - floor) * math.sqrt(max(warmup, 1) / number)
            for number in range(warmup + 1, warmup + after + 1)
        ],
    }
    # Seven steps a cycle: three down and, the lowest twice, three up to the peak.
    notch = (1 - floor) / (3 if floor else 4)
    triangle = [1 - k * notch for k in (1, 2, 3, 3, 2, 1, 0)]
    expected["cyclic"] = [triangle[k % 7] for k in range(after)]
    assert expected.keys() == set(get_args(Schedule))
    for schedule, values in expected.items():
        assert whole_run(schedule, run, floor) == pytest.approx(rising + values)


@settings(max_examples=50)
@given(run=runs, floor=floors, schedule=st.sampled_from(get_args(Schedule)))
def test_no_step_is_wasted(run, floor: float, schedule: Schedule) -> None:
    """A first step with learning rate 0 would learn nothing (torchtune#2010, torchtitan#1261)."""
    warmup, *_ = run
    found = whole_run(schedule, run, floor)
    assert all(value > 0 for value in found[:-1]) and max(found) <= 1
    if warmup:
        assert found[0] == 1 / warmup and found[warmup - 1] == 1
    if floor == 0:
        assert found[-1] > 0


@settings(max_examples=50)
@given(run=runs, floor=floors, schedule=st.sampled_from(DECAYING))
def test_the_last_step_is_the_smallest_exactly_once(run, floor: float, schedule: Schedule) -> None:
    warmup, *_ = run
    after_warmup = whole_run(schedule, run, floor)[warmup:]
    assert after_warmup == sorted(after_warmup, reverse=True)
    assert after_warmup[-1] == min(after_warmup) and after_warmup.count(after_warmup[-1]) == 1
    if floor:
        assert after_warmup[-1] == floor


@settings(max_examples=100)
@given(
    run=st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)),
    beyond=st.integers(0, 10_000),
    floor=floors,
    schedule=st.sampled_from(get_args(Schedule)),
)
def test_beyond_the_horizon_it_is_never_negative_nor_rises_again(run, beyond, floor, schedule) -> None:
    """A horizon counted in micro-batches runs out early (nanochat#775); nor may a decay of 0 steps divide."""
    warmup, horizon, decay = run
    found = lr_multiplier(
        horizon + beyond,
        schedule=schedule,
        warmup=warmup,
        horizon=horizon,
        decay=decay,
        floor=floor,
        cycle=CYCLE,
    )
    assert 0 <= found <= 1
    if schedule in DECAYING and horizon + beyond >= warmup:
        assert found == floor


@settings(max_examples=50)
@given(run=runs, floor=floors, longer=st.integers(0, 10**9))
def test_before_the_decay_a_free_schedule_does_not_depend_on_the_horizon(run, floor, longer: int) -> None:
    warmup, constant, decay = run
    horizon = warmup + constant + decay
    for schedule in get_args(Schedule):
        same = [
            lr_multiplier(
                step, schedule=schedule, warmup=warmup, horizon=h, decay=decay, floor=floor, cycle=CYCLE
            )
            for step in range(warmup + constant)
            for h in (horizon, horizon + longer + 1)
        ]
        if horizon_free(schedule):
            assert same[::2] == same[1::2]
        else:
            assert same[::2] != same[1::2]


def test_a_cycle_of_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="a cycle of 1 steps"):
        lr_multiplier(0, schedule="cyclic", warmup=0, horizon=9, decay=1, cycle=1)
