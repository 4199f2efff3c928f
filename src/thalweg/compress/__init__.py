"""Gradient compressors: their declarations, codecs and error feedback."""

from thalweg.compress.arrangement import Arrangement, Segment, arrange
from thalweg.compress.codec import (
    Codec,
    Feedback,
    GatheredCodec,
    Kernels,
    ShardableCodec,
    SummableCodec,
)
from thalweg.compress.compressor import Compressor, Payload

__all__ = [
    "Arrangement",
    "Codec",
    "Compressor",
    "Feedback",
    "GatheredCodec",
    "Kernels",
    "Payload",
    "Segment",
    "ShardableCodec",
    "SummableCodec",
    "arrange",
]
