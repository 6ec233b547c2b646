"""What a run will take, before it is paid for: formulas, a table of GPUs, and a simulation. Imports nothing but Python's own library.

Nothing here has been measured on a GPU. docs/plan.md says what was compared with what.
"""
