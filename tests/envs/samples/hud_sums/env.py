"""HUD: one template that asks for a sum, one that breaks while it grades."""

from hud import Environment

env = Environment("sums", version="0.1.0")


@env.template(id="add", description="answer a sum")
async def add(one: int, two: int):
    answer = yield f"What is {one} + {two}? Answer with the number only."
    yield 1.0 if str(answer).strip() == str(one + two) else 0.0


@env.template(id="broken", description="breaks while it grades")
async def broken(one: int):
    yield f"Say {one}."
    raise ValueError("the grader broke")
