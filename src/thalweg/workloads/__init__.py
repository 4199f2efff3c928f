"""Small real training jobs on data that ships with their packages."""
