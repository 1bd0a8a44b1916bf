"""Signals: numbers about a text, from which rulesets make verdicts.

    Arrow text -> code points with classes -> words, lines, paragraphs -> one row of counts a document

Counts, not shares: a ruleset divides them (`second_lines / lines > 0.3`), so one scan serves every threshold.
"""
