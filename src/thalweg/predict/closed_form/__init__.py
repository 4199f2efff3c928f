"""Closed-form costs of a step and of one exchange (the alpha-beta model)."""
