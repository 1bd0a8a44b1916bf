"""What general-purpose compressors need for the same bytes."""

from __future__ import annotations

import lzma


def xz_bytes(data: bytes) -> int:
    """Size after `xz -9e` (same container, filters and check)."""
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME))


def zstd_bytes(data: bytes) -> int:
    """Size after `zstd -19` (one frame)."""
    import pyarrow as pa

    return pa.Codec("zstd", compression_level=19).compress(data).size
