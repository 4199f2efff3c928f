"""Breaking a run on purpose, and checking that it keeps what its plan promises."""
