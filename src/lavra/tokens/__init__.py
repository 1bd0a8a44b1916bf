"""Token store (mmap shards + document index), stateless sampler, batches."""
