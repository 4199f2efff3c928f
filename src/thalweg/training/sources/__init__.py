"""Where the tensors of a bucket come from, and where results are written."""
