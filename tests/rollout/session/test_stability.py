"""Why a harness's turns do not extend one another."""

from miles.rollout.session.stability import Stability, stability

USER, MORE = {"role": "user", "content": "task"}, {"role": "user", "content": "go on"}


def system(text):
    return {"role": "system", "content": text}


async def causes(client_of, *requests):
    """Plays requests; "answer N" stands for what was answered to the N-th of them."""
    async with client_of(["one", "two", "three", "four"]) as client:
        answers = []
        for request in requests:
            answers.append(await client.chat([answers[m] if isinstance(m, int) else m for m in request]))
        return stability([client.tree()])


async def test_what_only_grows_extends(client_of):
    found = await causes(client_of, [USER], [USER, 0, MORE], [USER, 0, MORE, 1, MORE])
    assert (found.turns, found.extended, found.causes) == (3, 2, {})
    assert 0.5 < found.reused < 1


async def test_a_system_text_that_changes_is_shown_where_it_does(client_of):
    at = "You are here. Now: 10:41."
    found = await causes(client_of, [system(at), USER], [system(at.replace("41", "42")), USER, 0, MORE])
    assert found.causes == {"system text changed: 'You are here. Now: 10:41.' became 'You are here. Now: 10:42.'": 1}


async def test_dropped_messages_and_rewritten_answers(client_of):
    other = {"role": "assistant", "content": "something else"}
    found = await causes(client_of, [USER], [USER, 0, MORE], [USER, MORE], [USER, other, MORE])
    assert found.extended == 1
    assert sum(found.causes.values()) == 2
    assert any(cause.startswith("user stands where assistant stood (message 1)") for cause in found.causes)


async def test_a_message_that_is_put_in_and_reasoning_that_is_left_out(client_of):
    note = {"role": "user", "content": "a reminder"}
    found = await causes(client_of, [USER], [note, USER, 0, MORE])
    assert found.causes == {"a user message was put in (message 0)": 1}


def test_no_turns():
    assert stability([]) == Stability(turns=0, extended=0, prompt_tokens=0, new_tokens=0)
    assert stability([]).reused == 0.0
