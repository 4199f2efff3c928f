"""Compressors: how small what travels can be."""

from thalweg.compress.arrangement import Arrangement, Segment, arrange
from thalweg.compress.codec import Codec, Elementwise, Gathered, Kernels, Summed
from thalweg.compress.compressor import Compressor, Payload
from thalweg.compress.error_feedback import Feedback

__all__ = [
    "Arrangement",
    "Codec",
    "Compressor",
    "Elementwise",
    "Feedback",
    "Gathered",
    "Kernels",
    "Payload",
    "Segment",
    "Summed",
    "arrange",
]
