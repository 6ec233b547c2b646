"""An MCP server with a few tools, one of which remembers, and how to train with it.

    pip install 'rolecall[mcp]'
    rolecall rl --env "mcp:python examples/mcp_server.py" --rows data.jsonl --reward rewards.py:my_reward --steps 50

Every episode has a server of its own. One that all share, over HTTP:

    python examples/mcp_server.py 8000
    rolecall rl --env mcp:http://127.0.0.1:8000/mcp --agent.network --rows data.jsonl --reward rewards.py:my_reward --steps 50

Nothing in it knows of rolecall.
"""

import sys

from mcp.server import MCPServer

server = MCPServer("words", log_level="CRITICAL")
held: list[str] = []


@server.tool()
def product(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


@server.tool()
def remember(word: str) -> str:
    """Keep a word; all words so far."""
    if word == "no":
        raise ValueError("that word is not kept")
    held.append(word)
    return " ".join(held)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    server.run()
