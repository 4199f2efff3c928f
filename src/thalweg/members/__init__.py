"""The members of a run: who is there, what they agree on, and how failures are detected."""
