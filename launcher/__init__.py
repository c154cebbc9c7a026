"""Processes on hosts: the `launcher` command and what starts its ranks."""
