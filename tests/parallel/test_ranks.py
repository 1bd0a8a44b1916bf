"""Oracle: one process that does it all."""

from __future__ import annotations

import functools
import math
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.errors import DivergedError
from lavra.metrics import GRAD_NORM, TRAIN_LOSS, read_jsonl
from lavra.objective.causal import causal_numerator
from lavra.parallel.ranks import Ranks
from lavra.tokens.mixture import Mixture, Stage
from lavra.tokens.packing import ConcatRows
from lavra.tokens.ramps import Ramp, StepPlan
from lavra.tokens.sampler import Sampler
from lavra.tokens.windows import Windows
from lavra.train import loop
from lavra.train.config import GuardConfig
from lavra.train.horizon import Horizon
from lavra.train.loop import train
from lavra.train.signals import StopRequest
from lavra.train.step import accumulate

STEPS = 24


@given(size=st.integers(1, 9), count=st.integers(0, 40))
def test_the_shares_are_the_whole_in_order(size: int, count: int) -> None:
    samples = np.arange(7, 7 + count)
    parts = [Ranks(rank, size).share(samples) for rank in range(size)]
    assert np.array_equal(np.concatenate(parts), samples)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=25)
@given(
    sizes=st.lists(st.lists(st.integers(0, 30), max_size=6), min_size=1, max_size=5).filter(any),
    per_step=st.integers(1, 9),
    ranks=st.integers(1, 8),
    epoch=st.integers(0, 2),
)
def test_an_epoch_reads_every_document_once_for_any_number_of_processes_and_shards(
    write_store, sizes, per_step: int, ranks: int, epoch: int
) -> None:
    """lingua#61: with more shards than processes only the first ones were read, in a loop."""
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), [[[1] * n for n in shard] for shard in sizes])
        sampler = Sampler(Windows(store, ConcatRows(store, 8)), seed=3)
        rows = sampler.windows.count
        tokens: Counter[tuple[str, int]] = Counter()
        for first in range(epoch * rows, (epoch + 1) * rows, per_step):
            step = np.arange(first, min(first + per_step, (epoch + 1) * rows))
            for rank in range(ranks):
                for sample in Ranks(rank, ranks).share(step).tolist():
                    for span in sampler.documents(sample):
                        tokens.update((span.id, place) for place in range(span.start, span.stop))
    assert set(tokens.values()) == {1}
    assert Counter(name for name, _ in tokens) == {
        f"{i:032x}": n + 1 for i, n in enumerate(n for shard in sizes for n in shard)
    }


@pytest.fixture
def unequal(settings):
    """Settings of five samples a step: unequal shares on purpose, and other batches and lengths at the beginning."""
    return functools.partial(
        settings,
        steps=StepPlan(5, 16, [Ramp(16 * 30, 3)], [Ramp(16 * 50, 8)]),
        micro_batch_size=2,
        guard=GuardConfig(rewind_steps=2),
        keep_every=5,
    )


@pytest.fixture
def store(tmp_path, write_store):
    parts = [[[1 + (s + 3 * i) % 40 for i in range(30)] for s in range(20)] for _ in range(2)]
    return write_store(tmp_path / "tokens", parts, sources=["web", "books"])


def make_sampler(store) -> Sampler:
    windows = Windows(store, ConcatRows(store, 16))
    rows = dict(zip(store.sources, np.diff(windows.rows.source_rows).tolist(), strict=True))
    return Sampler(windows, 5, Mixture(rows, [Stage(0, {"web": 0.7, "books": 0.3})]))


def job(rank: int, model, store, folder, config, numerator=causal_numerator, steps=STEPS, order=None):
    """A training run on this rank; what it read, and how it ended."""
    loop.causal_numerator = numerator
    sampler, read, events = make_sampler(store), [], []
    batch = sampler.batch

    def recorded(samples):
        read.extend(samples.tolist())
        return batch(samples)

    sampler.batch = recorded
    horizon = Horizon(steps=steps, decay=8, decided=True)
    try:
        state = train(
            model, sampler, config, horizon, run_dir=folder, stop=StopRequest(), on_event=events.append
        )
    except DivergedError as error:
        return {"error": error.what, "events": events, "weights": [p.detach() for p in model.parameters()]}
    finally:
        loop.causal_numerator = causal_numerator
    return {
        "read": read,
        "ledger": state.ledger,
        "skipped": state.skipped,
        "events": events,
        "weights": [p.detach().numpy() for p in model.parameters()],
    }


def metrics_of(folder, name: str) -> list[float]:
    return [r[name] for r in read_jsonl(folder / "metrics.jsonl")]


def test_data_order_and_losses_are_equal_for_one_two_and_four_processes(
    tmp_path, tiny_model, store, ranks, unequal
) -> None:
    results = {}
    for size in (1, 2, 4):
        answers = ranks(size, job, tiny_model(), store, tmp_path / str(size), unequal())
        everything = sorted(s for a in answers for s in a["read"])
        assert everything[: 3 * 10] == list(range(30))  # each sample once, whoever read it
        results[size] = (
            answers[0]["ledger"],
            metrics_of(tmp_path / str(size), TRAIN_LOSS),
            metrics_of(tmp_path / str(size), GRAD_NORM),
            answers[0]["weights"],
        )
        for answer in answers[1:]:  # replicas never drift apart
            assert all(
                np.array_equal(a, b) for a, b in zip(answer["weights"], answers[0]["weights"], strict=True)
            )
    for size in (2, 4):
        assert results[size][0] == results[1][0]
        assert results[size][1] == pytest.approx(results[1][1], rel=2e-5)
        assert results[size][2] == pytest.approx(results[1][2], rel=1e-3)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_a_run_resumed_on_another_number_of_processes_reads_the_same_data(
    tmp_path, tiny_model, store, ranks, unequal, before: int, after: int
) -> None:
    """torchtitan#811: loader state of missing ranks was dropped in silence, or a KeyError."""
    ranks(1, job, tiny_model(), store, tmp_path / "whole", unequal())
    ranks(before, job, tiny_model(), store, tmp_path / "run", unequal(), causal_numerator, 11)
    answers = ranks(after, job, tiny_model(seed=3), store, tmp_path / "run", unequal())
    steps = unequal().steps
    read = sorted(s for answer in answers for s in answer["read"])
    ahead = steps.at(STEPS).count  # the batch made ready after the last step may have been read too
    assert (
        read[: len(read) - ahead]
        == list(range(steps.at(11).first, steps.at(STEPS).first))[: len(read) - ahead]
    )
    assert len(read) >= steps.at(STEPS).first - steps.at(11).first
    whole, resumed = metrics_of(tmp_path / "whole", TRAIN_LOSS), metrics_of(tmp_path / "run", TRAIN_LOSS)
    assert len(resumed) == STEPS
    # The decay of the first leg ended earlier; data and everything before it are the same.
    assert resumed[:3] == pytest.approx(whole[:3], rel=1e-5)
    assert metrics_of(tmp_path / "run", "tokens") == metrics_of(tmp_path / "whole", "tokens")
    assert [r["ledger"] for r in read_jsonl(tmp_path / "run/metrics.jsonl")] == [
        r["ledger"] for r in read_jsonl(tmp_path / "whole/metrics.jsonl")
    ]


def test_processes_read_different_samples_after_a_resume(tmp_path, tiny_model, store, ranks, unequal) -> None:
    """torchtitan#291, #409: only rank 0's loader state was saved, and all ranks resumed alike."""
    ranks(2, job, tiny_model(), store, tmp_path / "run", unequal(), causal_numerator, 10)
    one, two = ranks(2, job, tiny_model(), store, tmp_path / "run", unequal())
    assert one["read"] and two["read"] and not set(one["read"]) & set(two["read"])


def test_a_step_smaller_than_the_processes_ends_for_all_at_the_same_step(
    tmp_path, tiny_model, store, ranks, unequal
) -> None:
    """torchtitan#1618: one rank ran out of data first and the others waited for ever."""
    config = unequal(steps=StepPlan(1, 16))  # one of two processes has nothing in every step
    answers = ranks(2, job, tiny_model(), store, tmp_path / "two", config)
    ranks(1, job, tiny_model(), store, tmp_path / "one", config)
    assert metrics_of(tmp_path / "two", TRAIN_LOSS) == pytest.approx(
        metrics_of(tmp_path / "one", TRAIN_LOSS), rel=2e-5
    )
    assert all(np.array_equal(a, b) for a, b in zip(*(x["weights"] for x in answers), strict=True))


def infected(culprit: int, spread: bool):
    """NaN for one sequence; its gradients too, or only the loss, which the sum of gradients then says nothing of."""

    def numerator(model, batch):
        loss = causal_numerator(model, batch)
        if culprit not in batch.sample_ids.tolist():
            return loss
        return loss * math.nan if spread else loss + math.nan * loss.detach()

    return numerator


@pytest.mark.parametrize(("policy", "spread"), [("skip", True), ("skip", False), ("rewind", True)])
def test_nan_on_one_process_rejects_the_step_on_all_before_they_move(
    tmp_path, tiny_model, store, ranks, unequal, policy: str, spread: bool
) -> None:
    """torchtitan PR#3863: the check was local to a rank and came after optimizer.step."""
    config = unequal(guard=GuardConfig(policy=policy, rewind_steps=2))
    culprit = config.steps.at(15).first + 4  # read by the last process
    answers = ranks(2, job, tiny_model(), store, tmp_path / "run", config, infected(culprit, spread))
    assert all(np.array_equal(a, b) for a, b in zip(*(x["weights"] for x in answers), strict=True))
    assert all(np.isfinite(w).all() for w in answers[0]["weights"])
    assert answers[0]["skipped"] == answers[1]["skipped"] != []
    kinds = [e["kind"] for e in answers[0]["events"]]
    assert kinds == (["non_finite"] if policy == "skip" else ["non_finite", "rewound"])
    assert not answers[1]["events"]  # one record, not one a process
    assert len(metrics_of(tmp_path / "run", TRAIN_LOSS)) == STEPS


def test_the_event_of_two_processes_names_the_process_and_its_micro_batch(
    tmp_path, tiny_model, store, ranks, unequal
) -> None:
    config = unequal()
    culprit = config.steps.at(8).first + 2  # the second process's only sample, in sequences of 8

    class Infected(type(tiny_model())):  # weights are fine, one sequence is not
        def hidden(self, tokens, positions):
            result = super().hidden(tokens, positions)
            return torch.where((tokens[:, :8] == wanted[:8]).all(1)[:, None, None], math.nan, result)

    wanted = make_sampler(store).batch(np.array([culprit])).tokens[0]
    model = tiny_model()
    model.__class__ = Infected
    one, _ = ranks(2, job, model, store, tmp_path / "run", config)
    events = [e for e in one["events"] if any(s["sample"] == culprit for s in e["sequences"])]
    (sequence,) = [s for s in events[0]["sequences"] if s["sample"] == culprit]
    assert (sequence["rank"], sequence["micro_batch"]) == (1, 0)
    assert [d["id"] for d in sequence["documents"]] == [d.id for d in make_sampler(store).documents(culprit)]


def test_a_masked_rank_does_not_poison_the_loss(tiny_model, store, ranks) -> None:
    """OLMo-core#657: every label of one rank masked, 0/0 there, NaN everywhere."""

    def gradients(rank: int) -> list[np.ndarray]:
        model, everyone = tiny_model(), Ranks.current()
        batch = make_sampler(store).batch(everyone.share(np.arange(4)))
        batch.loss_mask[:] &= rank == 1
        result = accumulate(model, batch, micro_batch_size=1, precision="fp32", ranks=everyone)
        return [np.array(result.loss), *(p.grad.numpy() for p in model.parameters())]

    model = tiny_model()
    only = make_sampler(store).batch(np.arange(2, 4))  # the second process's part
    exact = accumulate(model, only, micro_batch_size=2, precision="fp32")
    for found in ranks(2, gradients):
        assert found[0] == pytest.approx(exact.loss, rel=1e-6)
        for mine, parameter in zip(found[1:], model.parameters(), strict=True):
            assert np.abs(mine - parameter.grad.numpy()).max() <= 1e-6


def test_gradients_are_summed_once_over_unequal_micro_batches(tmp_path, tiny_model, store, ranks) -> None:
    """build-nanogpt#30 (gradients left unsynced under accumulation), torchtitan#1842 (mean of means)."""

    def gradients(rank: int, micro: int) -> list[np.ndarray]:
        model, everyone = tiny_model(), Ranks.current()
        batch = make_sampler(store).batch(everyone.share(np.arange(7)))
        batch.loss_mask[0, 3 + rank :] = False
        result = accumulate(model, batch, micro_batch_size=micro, precision="fp32", ranks=everyone)
        return [np.array(result.loss), *(p.grad.numpy() for p in model.parameters())]

    model = tiny_model()
    whole = make_sampler(store).batch(np.arange(7))
    whole.loss_mask[0, 3:] = False
    whole.loss_mask[4, 4:] = False  # the second process's first
    exact = accumulate(model, whole, micro_batch_size=7, precision="fp32")
    for micro in (1, 2, 7):
        for found in ranks(2, gradients, micro):
            assert found[0] == pytest.approx(exact.loss, rel=1e-6)
            for mine, parameter in zip(found[1:], model.parameters(), strict=True):
                assert np.abs(mine - parameter.grad.numpy()).max() <= 1e-6
