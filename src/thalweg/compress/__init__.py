"""Compressors: how small what travels can be."""

from thalweg.compress.compressor import Compressor, Payload

__all__ = ["Compressor", "Payload"]
