"""Several processes training one model."""
