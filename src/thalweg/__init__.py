"""Thalweg: distributed training as fast as the network at hand allows."""

__version__ = "0.1.0"
