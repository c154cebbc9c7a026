"""Reading what DeepSpeed saved: every stage, precision and kind of file, without executing anything in it."""
