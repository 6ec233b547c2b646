"""Options: frozen dataclasses with a docstring under each field, and how files and flags become one of them.

Nothing here imports torch, so that `--help` and a spelling mistake are answered at once. A module per command holds its
options; `schema` reads them, `flags` and `files` read what the user wrote, `merge` puts it together and checks it,
`help` and `docs` write it out.
"""
