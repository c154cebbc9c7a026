"""CRC-32, the checksum of every zip file, as fast as the memory and one piece after the other or joined from pieces.

Works around: `zlib.crc32` of Python 3.11 sums 2.7 to 4.2 GB/s on a core, a third of what a load has to do beside the disk. ISA-L's
(package isal 1.9) gives the same numbers at 20 to 50 GB/s and, like zlib's, lets other threads run meanwhile; it can join, too.
"""

from isal.isal_zlib import crc32
from isal.isal_zlib import crc32_combine as combine

__all__ = ["combine", "crc32"]
