"""Compressors: how small what travels can be."""

from thalweg.compress.arrangement import Arrangement, Segment, arrange
from thalweg.compress.codec import Codec, Elementwise, Gathered, Summed
from thalweg.compress.compressor import Compressor, Payload
from thalweg.compress.feedback import Feedback
from thalweg.compress.kernels import NUMPY_KERNELS, Kernels

__all__ = [
    "NUMPY_KERNELS",
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
