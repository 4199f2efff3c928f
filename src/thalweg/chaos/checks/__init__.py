"""Checks of a recorded history: what must hold whatever faults were injected."""
