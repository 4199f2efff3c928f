"""attach(): an ordinary training script, synchronised under any plan."""
