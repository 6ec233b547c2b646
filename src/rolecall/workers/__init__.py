"""Processes that run other people's code: rewards, tools, environments.

`pool` starts them, talks to them and replaces those that hang or die; `process` is one of them as the trainer sees it,
`child` the other side of it; `load` finds an object by its name. What is run is the users' matter: a module with
`open_worker`.
"""
