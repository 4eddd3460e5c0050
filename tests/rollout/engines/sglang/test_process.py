"""Servers as processes: launched, killed, replaced, gone with their parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from miles.errors import ConfigError
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.engine import SGLangEngine
from miles.rollout.engines.sglang.install import default_python, install
from miles.rollout.engines.sglang.process import forget_shared_memory, server_arguments
from miles.types import GenerateRequest, Weights


def request(name, session="s"):
    return GenerateRequest(id=name, session=session, prompt_ids=[5, 6, 7], max_tokens=4)


def variables_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
async def test_a_killed_server_is_replaced_at_the_present_weights_and_none_stays(model, tmp_path, launched):
    engine = SGLangEngine(model, tmp_path, SGLangConfig(servers=2, **launched))
    await engine.start()
    pids = list(engine.pids.values())
    shares = b"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=false\0"  # a trainer may be on one of a server's GPUs
    assert shares in variables_of(pids[0])
    await engine.load(Weights(version=3, directory=model))
    os.kill(pids[0], signal.SIGKILL)
    for number in range(6):
        done = await engine.generate(request(f"r{number}", f"s{number}"))
        assert set(done.versions) == {3}
    async with asyncio.timeout(60):
        while engine.counters()["engine/servers"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert engine.pids["sglang-0"] not in (None, pids[0])
    for number in range(6):
        assert set((await engine.generate(request(f"t{number}", f"t{number}"))).versions) == {3}
    pids += engine.pids.values()
    await engine.close()
    assert not any(map(lives, pids))
    assert "says the emulator" not in (tmp_path / "sglang-0.log").read_text()


@pytest.mark.slow
async def test_a_server_that_does_not_come_up_is_named_with_the_end_of_its_log(model, tmp_path, launched):
    launched["environment"] = {**launched["environment"], "EMULATOR_FAILS": "1"}
    engine = SGLangEngine(model, tmp_path, SGLangConfig(servers=2, **launched))
    with pytest.raises(ConfigError, match=r"ended at its start; .*sglang-\d\.log ends with:\n.*says the emulator"):
        await engine.start()


@pytest.mark.slow
def test_servers_end_with_a_killed_driver(model, tmp_path, launched):
    code = f"""
        import asyncio
        from pathlib import Path, PosixPath
        from miles.rollout.engines.sglang.config import SGLangConfig
        from miles.rollout.engines.sglang.engine import SGLangEngine

        async def main():
            engine = SGLangEngine(Path({str(model)!r}), Path({str(tmp_path)!r}), SGLangConfig(**{launched!r}))
            await engine.start()
            print(engine.pids["sglang-0"], flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    pid = int(driver.stdout.readline())
    assert lives(pid)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    until = time.monotonic() + 10
    while lives(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(pid)


def test_arguments_say_what_the_settings_say(tmp_path):
    settings = SGLangConfig(tp=2, dp=2, memory=0.5, deterministic=True, record_routing=True, flags=("--x", "y"))
    words = server_arguments(settings, tmp_path, gpu=True, lora=(8, ("q_proj", "v_proj")), dtype="bfloat16")
    text = " ".join(words)
    for part in (
        "--tp-size 2 --dp-size 2 --mem-fraction-static 0.5",
        "--dtype bfloat16",
        "--enable-deterministic-inference --enable-return-routed-experts",
        "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj --x y",
    ):
        assert part in text
    assert "--device" not in words
    cpu = server_arguments(SGLangConfig(), tmp_path, gpu=False)
    assert "--device cpu" in " ".join(cpu)
    assert "--attention-backend torch_native" in " ".join(cpu)


def test_a_small_models_cache_is_no_larger_than_kernels_can_count(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}')
    words = server_arguments(SGLangConfig(), tmp_path, gpu=True)
    assert words[words.index("--max-total-tokens") + 1] == str((1 << 30) // 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": (0, 1), "servers": 1}, "names 2 GPUs; 1 servers of 1 need 1"),
        ({"gpus": (0, 0), "servers": 2}, "names a GPU twice"),
        ({"router": "http://r"}, "router needs engine.sglang.urls"),
        ({"router": "http://r", "urls": ("http://u",), "record_routing": True}, "drops the fields that record routing"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message):
        SGLangConfig(**settings)


def test_the_newest_installed_python_is_found_and_a_missing_one_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.rollout.engines.sglang.install.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"`miles engine install sglang --cpu`"):
        default_python(tmp_path)
    for at, release in enumerate(("0.5.18", "0.5.17")):
        folder = tmp_path / "engines" / f"sglang-{release}-cpu"
        folder.mkdir(parents=True)
        (folder / "installed.json").write_text("{}")
        os.utime(folder / "installed.json", (at, at))
    assert default_python(tmp_path) == tmp_path / "engines" / "sglang-0.5.17-cpu" / "bin" / "python"
    assert install(cpu=True, home=tmp_path, tell=lambda text: None) == tmp_path / "engines" / "sglang-0.5.17-cpu"


def test_installs_that_cannot_work_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.rollout.engines.sglang.install.has_gpu", lambda: True)
    with pytest.raises(ConfigError, match="this machine has a GPU: leave it out"):
        install(cpu=True, home=tmp_path)
    monkeypatch.setattr("miles.rollout.engines.sglang.install.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        install(cpu=False, home=tmp_path)
    with pytest.raises(ConfigError, match=r"only SGLang 0\.5\.17 is known to run"):
        install(cpu=True, release="0.5.23", home=tmp_path)
    assert not list(tmp_path.rglob("*"))


def test_shared_memory_of_dead_servers_is_forgotten(tmp_path):
    old, new = tmp_path / "sglang_loads_a.shm", tmp_path / "sglang_loads_b.shm"
    for path in (old, new, tmp_path / "other.shm"):
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    os.utime(new)
    forget_shared_memory(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.shm", "sglang_loads_b.shm"]
