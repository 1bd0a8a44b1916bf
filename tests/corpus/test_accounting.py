"""Counters that add up whatever the order of units."""

import random

import pytest

from lavra.corpus.accounting import Tally, check, describe_losses
from lavra.errors import LavraError


def test_merging_units_does_not_depend_on_their_order():
    draw = random.Random(0)
    units = []
    for _ in range(6):
        tally = Tally()
        for _ in range(50):
            tally.add(
                ("outcome", draw.choice("kde"), draw.choice("xy"), "prose", ".md"), 1, draw.randint(1, 9)
            )
        units.append(tally.to_rows())
    forward = Tally(row for rows in units for row in rows).to_rows()
    assert forward == Tally(row for rows in reversed(units) for row in rows).to_rows()
    assert Tally(forward).sum("outcome")[0] == 300


def test_a_document_with_two_reasons_counts_under_both_and_under_no_only():
    tally = Tally()
    tally.drop(["too_short", "few_letters"], "s", 10)
    tally.drop(["too_short"], "s", 5)
    assert tally.sum("reason", "too_short") == (2, 15) and tally.sum("reason", "few_letters") == (1, 10)
    assert tally.sum("only", "too_short") == (1, 5) and tally.sum("only", "few_letters") == (0, 0)
    assert describe_losses(tally) == "2 too_short, 1 few_letters"


@pytest.mark.parametrize(("total", "unit"), [((3, 10), "documents"), ((2, 11), "bytes")])
def test_parts_that_do_not_add_up_are_refused(total, unit):
    with pytest.raises(LavraError, match=f"does not add up in {unit}"):
        check("records_in", total, {"kept": (1, 4), "dropped": (1, 6)}, "unit 0")
