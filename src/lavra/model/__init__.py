"""Plain `nn.Module`s: configuration with exact counts, attention, decoder."""
