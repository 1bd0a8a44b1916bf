"""What went wrong in a training run, from its own records. No torch."""
