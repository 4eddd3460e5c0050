from miles.envs.toy import GuessNumberTaskset
from miles.types import Transcript

NOTHING = Transcript(messages=(), final_text="", turns=0)


async def played(*actions):
    taskset = GuessNumberTaskset()
    task = taskset.task("train", 30)
    assert task.data["secret"] == 36
    env = taskset.env(task, None)
    await env.reset()
    return [await env.step(action) for action in actions], await env.score(NOTHING)


async def test_answers_lead_to_the_number_and_the_sooner_the_better():
    steps, score = await played("50", " 30 ", "36")
    assert [step.observation for step in steps] == ["lower", "higher", "right"]
    assert steps[-1].terminated
    assert score.reward == 1 / 3


async def test_nonsense_costs_a_guess_and_seven_are_the_end():
    steps, score = await played("many", *["1"] * 6)
    assert steps[0].observation == "not a number"
    assert [step.truncated for step in steps] == [False] * 6 + [True]
    assert score.reward == 0.0
