"""An MCP server with a few tools, one of which remembers."""

import sys

from mcp.server import MCPServer

server = MCPServer("test", log_level="CRITICAL")
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
