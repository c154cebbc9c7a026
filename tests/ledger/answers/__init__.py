"""How each kind of a known-answers file is asked of the ledger's public functions."""
