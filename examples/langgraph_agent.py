"""An agent of LangGraph with a tool, as its documentation shows them, and how to train it.

    pip install langgraph langchain-openai
    rolecall rl --agent examples/langgraph_agent.py:run --rows data.jsonl --steps 50

The rows have a `prompt` and an `answer`. The model's chat template must show tools.
"""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calc(expression: str) -> str:
    """The value of a product.

    Args:
        expression: such as 6*7
    """
    a, b = expression.split("*")
    return str(int(a) * int(b))


def run(base_url, key, row):
    model = ChatOpenAI(model="gpt-any", base_url=base_url, api_key=key).bind_tools([calc])
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([calc]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    found = graph.compile().invoke({"messages": [("user", row["prompt"])]})
    return float(found["messages"][-1].content == row["answer"])
