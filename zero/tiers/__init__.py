"""Tiers: where the bytes of a state rest between their uses: on the device, in host memory, or in files on a drive."""
