"""The import paths under which DeepSpeed scripts find schedules, ZeRO names and helpers; nothing is implemented here."""
