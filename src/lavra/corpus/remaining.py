"""Documents of a unit that neither a rule nor an earlier step has taken out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from lavra.corpus.dedup import copies_of_unit
from lavra.corpus.judge_pass import open_verdicts
from lavra.corpus.records import Records
from lavra.corpus.store import iter_part
from lavra.corpus.unit_files import WriteUnit


def iter_remaining(
    unit: WriteUnit, copies: Sequence[Records], columns: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, Records]]:
    """Batches of some columns, and the rows of their documents in the unit.

    Args:
        copies: `COPY` rows that are taken out, of all units.
    """
    verdicts, gone = open_verdicts(unit), copies_of_unit(copies, unit.read.unit)["row"]
    start = 0
    for batch in iter_part(unit.read.documents, columns):
        rows = np.arange(start, start + batch.num_rows)
        start += batch.num_rows
        there = ~verdicts[rows].any(axis=1) & ~np.isin(rows, gone)
        yield batch.filter(pa.array(there)), rows[there]
