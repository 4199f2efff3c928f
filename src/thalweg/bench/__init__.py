"""Scenarios in, comparable tables out."""
