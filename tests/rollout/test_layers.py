import pytest

from miles.errors import RunError
from miles.rollout.layers import RolloutSource
from tests.trees import group


class SelfPlay:
    """The rollout layer in six lines: it makes whole groups."""

    async def groups(self):
        for number in range(5):
            yield group(1.0, 0.0, id=f"g{number}")


async def test_groups_of_any_make_reach_the_trainer_and_resume_where_they_were():
    source = RolloutSource(SelfPlay())
    assert [g.id for g in await source.take(2)] == ["g0", "g1"]
    assert [g.id for g in await RolloutSource(SelfPlay(), state=source.state()).take(1)] == ["g0"]  # not trained yet
    source.trained()
    resumed = RolloutSource(SelfPlay(), state=source.state())
    assert [g.id for g in await resumed.take(2)] == ["g2", "g3"]
    with pytest.raises(RunError, match="ended with 1 of 2 groups"):
        await resumed.take(2)
