"""Everything that `thalweg explain` prints or draws."""
