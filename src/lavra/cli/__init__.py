"""The `lavra` command: one file a verb, imported only when that verb is called."""
