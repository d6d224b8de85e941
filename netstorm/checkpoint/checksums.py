"""CRC-32C of any bytes, as eight hexadecimal digits."""

from __future__ import annotations

from typing import TypeAlias

import google_crc32c
import numpy as np

__all__ = ["Bytes", "checksum", "checksum_number"]

Bytes: TypeAlias = bytes | bytearray | memoryview


def checksum_number(data: Bytes) -> int:
    """Return the CRC-32C (RFC 3720, B.4), which finds every change of up to 32 bits in a row."""
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


def checksum(data: Bytes) -> str:
    """Return the CRC-32C as it stands in manifests."""
    return f"{checksum_number(data):08x}"
