"""What clients send and how they replay it, for the scenarios."""

import json

THINK = "<think>\nlet me see\n</think>\n\n"


def call(command, name="shell"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'command': command}})}\n</tool_call>"


def function(name):
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


SHELL = function("shell")


SHELL_ANTHROPIC = {"name": "shell", "description": "", "input_schema": SHELL["function"]["parameters"]}


SHELL_RESPONSES = {"type": "function", "name": "shell", "parameters": SHELL["function"]["parameters"], "strict": False}


def user(text):
    return {"role": "user", "content": text}


def compact(message):
    """As JavaScript clients replay a message: arguments through JSON.parse and JSON.stringify."""
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]))}}
        for c in message.get("tool_calls", [])
    ]
    for c in calls:
        c["function"]["arguments"] = c["function"]["arguments"].replace(": ", ":")
    return {**message, "tool_calls": calls} if calls else message


def results(message, *texts):
    return [
        {"role": "tool", "tool_call_id": c["id"], "content": text}
        for c, text in zip(message["tool_calls"], texts, strict=True)
    ]


def linear(client, turns):
    """One path, no forks, every id exact, everything trained."""
    tree = client.exact()
    assert client.shape() == [(None, "root"), *((n, "extend") for n in range(turns - 1))]
    assert all(turn.trainable for turn in tree.turns)


def codex_items(reply):
    """As Codex replays what we sent: status added, null content on reasoning, all ids kept."""
    items = []
    for item in reply["output"]:
        more = {"content": None} if item["type"] == "reasoning" else {"status": "completed"}
        items.append({**item, **more})
    return items
