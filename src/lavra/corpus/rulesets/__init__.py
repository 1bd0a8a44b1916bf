"""Rulesets: named lists of verdicts over signals, one YAML file each, and the code that reads and judges them."""
