"""Agents: episodes of several turns.

`environments` finds environments by name, `replies` checks what they say, `pool` runs them, `conversation` keeps a
player's tokens and roles, `play` plays, `episodes` scores and collects. What an environment is, is said in `tasks.env`.
"""
