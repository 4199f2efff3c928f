"""Compressors: how small what travels can be."""

from thalweg.compress.arrangement import Arrangement, Segment, arrange
from thalweg.compress.codec import Codec, GatheredCodec, Kernels, ShardableCodec, SummableCodec
from thalweg.compress.compressor import Compressor, Payload
from thalweg.compress.error_feedback import Feedback

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
