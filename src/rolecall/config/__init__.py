"""Options of every command as frozen dataclasses. Nothing here imports torch: `--help` must be quick."""
