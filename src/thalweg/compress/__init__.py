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
from thalweg.compress.kept import RESIDUAL_KIND, Combine, Kept

__all__ = [
    "RESIDUAL_KIND",
    "Arrangement",
    "Codec",
    "Combine",
    "Compressor",
    "Feedback",
    "GatheredCodec",
    "Kept",
    "Kernels",
    "Payload",
    "Segment",
    "ShardableCodec",
    "SummableCodec",
    "arrange",
]
