"""A conformance kit: the maths of reinforcement learning on masked positions, as cases that any library can run.

`interface` says what a library may offer and in which shapes, `cases` hold the tests, `references` the float64 loops
they compare with, `adapters` what rolecall, TRL, verl and OpenRLHF offer. `plugin` is the pytest plugin, `run` the
command's way through it.
"""
