"""A package of verifiers before 0.4: guess in several turns, two weighted rewards and a metric."""

import re

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = re.findall(r"\d+", str(messages[-1].content))
        number, secret = int(said[0]) if said else -1, int(state["answer"])
        if number == secret:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if number < secret else "lower"}]


def right(completion, answer):
    said = [message for message in completion if message.role == "assistant"][-1]
    return float(answer in re.findall(r"\d+", str(said.content)))


def quick(state):
    if state["info"].get("broken"):
        raise ValueError("the reward function broke")
    return 1.0 / max(1, len(state["trajectory"]))


def letters(completion):
    return float(sum(len(str(message.content)) for message in completion))


def load_environment(broken: bool = False, max_turns: int = 6):
    def rows(offset):
        return Dataset.from_list(
            [
                {
                    "question": "Guess my number between 1 and 16.",
                    "answer": str((3 * n + offset) % 16 + 1),
                    "info": {"broken": broken},
                }
                for n in range(6)
            ]
        )

    rubric = vf.Rubric(funcs=[right, quick], weights=[1.0, 0.5])
    rubric.add_metric(letters)
    return Guess(dataset=rows(0), eval_dataset=rows(1), rubric=rubric, max_turns=max_turns)
