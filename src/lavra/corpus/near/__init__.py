"""Near-duplicate documents: MinHash finds candidates, their exact shingles decide, one document of a cluster stays."""
