"""From raw text to a clean, split and accounted corpus.

    scan_sources -> plan_units -> read units -> deduplicate -> split -> write units -> accounting

Documents travel as Arrow record batches; nothing here imports torch.
"""
