"""The dry run: a user's own script as one rank of many, on fake tensors, without an accelerator."""
