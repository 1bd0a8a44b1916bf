"""The training loop, the step with its one loss path, signals, callbacks."""
