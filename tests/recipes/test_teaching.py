"""Demonstrations out of solutions."""

from itertools import islice

from miles.envs.gymnasium import GymnasiumConfig, GymnasiumTaskset
from miles.envs.toy import GuessNumberTaskset
from miles.envs.vault import VaultTaskset
from miles.recipes.teaching import taught


async def test_a_taskset_that_has_demonstrations_or_knows_no_solution_is_left_alone():
    vault = VaultTaskset()
    assert await taught(vault) is vault
    slippery = GymnasiumTaskset(GymnasiumConfig(id="FrozenLake-v1", count=2))
    assert await taught(slippery) is slippery


async def test_half_of_the_demonstrations_play_the_solution_and_all_are_conversations_with_tools():
    lake = GymnasiumTaskset(GymnasiumConfig(id="FrozenLake-v1", kwargs={"is_slippery": False}, count=8))
    shown = list(islice((await taught(lake)).demonstrations(1), 8))
    right = [messages for messages, _ in shown if [m["role"] for m in messages].count("assistant") == 6]
    assert len(right) >= 4
    for messages, tools in shown:
        assert [tool["function"]["name"] for tool in tools] == ["act"]
        assert [m["role"] for m in messages] == ["user", *["assistant", "tool"] * (len(messages) // 2)][: len(messages)]
        assert messages[-1]["role"] == "assistant"


async def test_the_same_seed_gives_the_same_order_and_frequent_words_are_known():
    taskset = await taught(GuessNumberTaskset())
    one, two, other = (list(islice(taskset.demonstrations(seed), 20)) for seed in (1, 1, 2))
    assert one == two != other
    assert "number " in taskset.vocabulary()
    assert taskset.tasks("test") == GuessNumberTaskset().tasks("test")
