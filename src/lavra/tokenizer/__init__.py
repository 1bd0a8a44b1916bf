"""Tokenizers: byte-level BPE training, loading, facts about fertility."""
