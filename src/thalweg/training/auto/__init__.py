"""The plan `auto`: measure, rank candidate plans, choose one, check it while it runs."""
