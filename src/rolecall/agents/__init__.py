"""Agents: episodes of several turns.

`environments` finds environments by name, `replies` checks what they say, `pool` runs them, `conversation` keeps a
player's tokens and roles, `play` plays, `episodes` scores and collects. What an environment is, is said in `tasks.env`.

Programs that play by themselves: `programs` runs them (`program_worker` is the other side), `gateway` answers their calls,
`chat_api` is what goes over the wire, `transcript` tells which call goes on from which and keeps the samples.
"""
