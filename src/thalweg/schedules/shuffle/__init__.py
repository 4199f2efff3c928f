"""The groups of DS-Sync: which ranks average at which step, which links are contended."""
