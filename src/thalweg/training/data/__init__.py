"""Which samples each rank computes at each step: sampler, loader, position in the data."""
