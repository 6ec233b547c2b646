"""The cases, a file per subject. A case's arguments name the functions of the adapter that it needs; its docstring says
what it asks. Values are worked by hand or come from the loops in `references`."""
