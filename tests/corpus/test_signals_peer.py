"""Oracle: datatrove's own filters, each rule alone, on the words that lavra's splitter gives."""
