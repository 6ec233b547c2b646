"""The Python API: a function for each command, which takes its options and does the work."""
