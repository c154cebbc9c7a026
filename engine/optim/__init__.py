"""Optimizer algorithms that torch lacks, one file each."""
