"""`python -m thalweg` is `thalweg`."""

from thalweg.cli.main import run

run()
