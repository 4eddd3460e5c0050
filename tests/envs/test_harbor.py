"""Harbor's task folders, read and scored by us."""

import shlex
import shutil
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from miles.envs.harbor import HarborTaskset, _only, read_task
from miles.envs.workers.taskset import WorkerConfig
from miles.errors import ConfigError, EnvError
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
from miles.types import Transcript

SAMPLES = Path(__file__).parent / "samples" / "harbor_tasks"
NOTHING = Transcript(messages=(), final_text="", turns=1)


def tasksets(folder=SAMPLES, **settings):
    told = {"folder": str(folder), "ignore_image": True, **settings}
    return HarborTaskset(WorkerConfig(name="tasks", python=Path("python"), kind="", settings=told))


@pytest.fixture
async def pool():
    config = SandboxConfig()
    made = SandboxPool(make_backend(config), config)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def folder(tmp_path):
    """A copy of the shared task, to be changed."""
    return Path(shutil.copytree(SAMPLES / "shared", tmp_path / "task"))


async def score(pool, taskset, *commands, number=0):
    task = taskset.tasks("train")[number]
    async with pool.sandbox(taskset.sandbox(task)) as sandbox:
        env = taskset.env(task, sandbox)
        env.more_sandboxes = pool.sandbox
        await env.reset()
        for command in commands:
            await sandbox.exec(command)
        await sandbox.quiesce()
        return await env.score(NOTHING)


SOLVE = "echo 42 > /app/sum.txt"


def test_a_folder_says_what_to_do_and_where():
    task = read_task(SAMPLES / "shared")
    assert (task.name, task.instruction) == ("miles/shared", "Write the sum of 19 and 23 into /app/sum.txt.\n")
    assert (task.agent_s, task.verifier_s, task.separate, task.network) == (60.0, 30.0, False, False)
    spec = HarborTaskset(
        WorkerConfig(name="x", python=Path("python"), kind="", settings={"folder": str(SAMPLES)})
    ).sandbox(tasksets().tasks("train")[1])
    assert (spec.image.dockerfile, spec.workdir) == (SAMPLES / "shared" / "environment", "/app")


def test_older_words_of_a_task_still_count(folder):
    (folder / "task.toml").write_text('[environment]\nmemory = "2G"\nallow_internet = false\ndocker_image = "a:1"\n')
    task = read_task(folder)
    assert (task.memory_mib, task.network, task.image, task.name) == (2048, False, "a:1", "task")


@pytest.mark.parametrize("number", [0, 1], ids=["separate", "shared"])
async def test_the_solution_scores_1_and_nothing_0_whatever_reward_was_written_before(pool, number):
    taskset = tasksets()
    early = (
        "mkdir -p /logs/verifier /tests; cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 1}' > reward.json"
    )
    forged = (
        f"{early}; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod -w /tests/test.sh"
    )
    assert (await score(pool, taskset, SOLVE, number=number)).reward == 1.0
    assert (await score(pool, taskset, early, number=number)).reward == 0.0
    assert (await score(pool, taskset, forged, number=number)).reward == 0.0


async def test_only_the_artifacts_cross_to_a_verifier_of_its_own_whatever_the_agents_tar_says(pool):
    forged = "#!/bin/sh\nmkdir -p /f/tests /f/app; echo 'echo 1 > /logs/verifier/reward.txt' > /f/tests/test.sh\n"
    forged += "echo 41 > /f/app/sum.txt; ln -s /etc/passwd /f/app/link; exec /usr/bin/tar -c -C /f tests app\n"
    command = f"mkdir -p /fake && printf %s {shlex.quote(forged)} > /fake/tar && chmod +x /fake/tar"
    # the agent's tar is found first
    command += "; ln -sf /fake/tar /bin/tar 2>/dev/null; true"
    taskset = tasksets()
    assert (await score(pool, taskset, command, number=0)).reward == 0.0
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("tests/test.sh", "app/sum.txt", "../app/sum.txt", "app/../tests/x", "logs/artifacts/a"):
            archive.addfile(tarfile.TarInfo(name), BytesIO())
        link = tarfile.TarInfo("app/sum.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with tarfile.open(fileobj=BytesIO(_only(packed.getvalue(), ["logs/artifacts", "app/sum.txt"]))) as kept:
        assert [(member.name, member.isreg()) for member in kept] == [("app/sum.txt", True), ("logs/artifacts/a", True)]
    with pytest.raises(EnvError, match="no tarball"):
        _only(b"nonsense" * 200, ["app"])


def test_a_tasks_own_deadlines_are_its_episodes(folder):
    taskset = tasksets(folder)
    assert read_task(folder).verifier_s == 30.0
    assert taskset.seconds(taskset.tasks("train")[0]) == {"agent": 60.0, "score": 90.0}
    (folder / "task.toml").write_text('[verifier]\nuser = "somebody"\n')
    with pytest.raises(ConfigError, match="verified as the user somebody"):
        tasksets(folder)


async def test_json_comes_before_text_and_its_other_numbers_are_parts(pool, folder):
    test = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
    test += """echo '{"reward": 0.25, "style": 2}' > /logs/verifier/reward.json; exit 9\n"""
    (folder / "tests" / "test.sh").write_text(test)
    found = await score(pool, tasksets(folder))
    assert (found.reward, found.parts) == (0.25, {"style": 2.0})


@pytest.mark.parametrize(
    "test, error",
    [
        ("echo nothing to say", "wrote no /logs/verifier/reward.txt.*\nnothing to say"),
        ("echo good > /logs/verifier/reward.txt", "'good\\\\n', which is no reward"),
        ("echo nan > /logs/verifier/reward.txt", "no finite reward"),
        ("echo '[1]' > /logs/verifier/reward.json", "which is no reward"),
        ("sleep 60", "took longer than 1 s"),
    ],
)
async def test_tests_that_give_no_reward_are_the_environments_error_never_a_zero(pool, folder, test, error):
    (folder / "tests" / "test.sh").write_text(f"#!/bin/sh\n{test}\n")
    toml = (folder / "task.toml").read_text().replace("timeout_sec = 30.0", "timeout_sec = 1.0")
    (folder / "task.toml").write_text(toml)
    with pytest.raises(EnvError, match=error):
        await score(pool, tasksets(folder))


def test_variables_come_from_ours_or_their_default_and_missing_ones_are_told(folder, monkeypatch):
    monkeypatch.setenv("TOKEN", "abc")
    (folder / "task.toml").write_text('[environment]\nenv = { A = "${TOKEN}", B = "${NO_SUCH:-b}", C = "x${TOKEN}" }\n')
    taskset = tasksets(folder)
    assert dict(taskset.sandbox(taskset.tasks("train")[0]).env) == {"A": "abc", "B": "b", "C": "x${TOKEN}"}
    (folder / "task.toml").write_text('[environment]\nenv = { A = "${NO_SUCH}" }\n')
    taskset = tasksets(folder)
    with pytest.raises(EnvError, match="NO_SUCH, which is not set"):
        taskset.sandbox(taskset.tasks("train")[0])


def test_what_cannot_be_played_is_told(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"has no task\.toml"):
        tasksets(tmp_path / "task" / "tests")
    (folder / "task.toml").write_text('[[steps]]\nname = "one"\n')
    with pytest.raises(ConfigError, match="several steps: add it with --layer agent"):
        tasksets(folder)
    (folder / "task.toml").write_text("")
    (folder / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"no instruction\.md"):
        read_task(folder)
