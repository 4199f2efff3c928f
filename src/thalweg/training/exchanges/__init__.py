"""How a bucket is synchronised: rounds, a coded tree, a server, a native collective."""
