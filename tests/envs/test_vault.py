import itertools

from miles.config import build
from miles.envs.vault import KEYS, NAMES, VaultConfig, VaultTaskset
from miles.types import Transcript


def transcript(text):
    return Transcript(messages=(), final_text=text, turns=1)


def test_tasks_are_the_same_for_the_same_seed_and_splits_differ():
    one, two = VaultTaskset(), VaultTaskset()
    assert one.tasks("test") == two.tasks("test")
    other = VaultTaskset(build(VaultConfig, {"seed": 1}))
    assert [t.data for t in other.tasks("test")] != [t.data for t in one.tasks("test")]
    ids = [task.id for split in ("train", "test") for task in one.tasks(split)]
    assert len(set(ids)) == len(ids) == 4296


def test_no_held_out_task_is_a_training_task():
    train, test = ({repr(task.data) for task in VaultTaskset().tasks(split)} for split in ("train", "test"))
    assert not train & test
    assert len(VaultTaskset().tasks("test")) == 200


def test_following_the_files_leads_to_the_key():
    for task in VaultTaskset().tasks("test"):
        word, name = task.prompt[0]["content"].split()
        for _ in range(3):
            word, name = task.data["files"][name].split()
            if word == "key":
                break
        assert (word, name) == ("key", task.data["key"])
        assert VaultTaskset().sandbox(task).files[f"/workspace/{task.prompt[0]['content'].split()[1]}"]


async def test_only_the_exact_key_scores():
    taskset = VaultTaskset()
    task = taskset.tasks("test")[0]
    env = taskset.env(task, None)
    assert (await env.score(transcript(f"answer {task.data['key']}\n"))).reward == 1.0
    for wrong in ("", "answer", task.data["key"], f"answer {task.data['key']}0", "answer 1e2"):
        assert (await env.score(transcript(wrong))).reward == 0.0


def test_demonstrations_err_as_often_as_configured():
    def answers(**settings):
        taskset = VaultTaskset(VaultConfig(**settings))
        demos = itertools.islice(taskset.demonstrations(0), 300)
        return [messages for messages, _ in demos]

    perfect = answers(guess_first=0.0, guess_later=0.0, wrong_file=0.0)
    assert all(messages[-1]["content"].startswith("answer ") and len(messages) >= 4 for messages in perfect)
    hasty = answers(guess_first=1.0)
    assert all(len(messages) == 2 for messages in hasty)


def test_the_vocabulary_is_distinct_words():
    assert len(set(NAMES)) == 48
    assert len(set(KEYS)) == 100
