import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from miles.deltas import LocalCheckpoint, Snapshot, apply_delta, read_delta, write_delta
from miles.errors import EngineError


def snapshot(tensors):
    return Snapshot.of_tensors({name: t.clone() for name, t in tensors.items()})


def changed(before, places, dtype):
    after = before.clone()
    for place in places:
        after.view(-1)[place] = torch.tensor(float(place % 7) + 0.5).to(dtype)
    return after


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.lists(st.integers(0, 199_999), max_size=40),
    st.sampled_from([200_000, 300]),
)
def test_a_delta_turns_the_base_into_the_new_version_bit_by_bit(tmp_path_factory, dtype, places, size):
    base = torch.zeros(size, dtype=dtype)
    new = changed(base, [place % size for place in places], dtype)
    path = tmp_path_factory.mktemp("delta") / "v1.delta"
    write_delta(path, snapshot({"w": base}), snapshot({"w": new}), version=1, base=0)
    received = {"w": Snapshot.of_tensors({"w": base}).bits["w"].copy()}
    apply_delta(received, *read_delta(path))
    assert (received["w"] == Snapshot.of_tensors({"w": new}).bits["w"]).all()


def test_unchanged_tensors_cost_nothing_and_facts_are_told(tmp_path):
    before = {"a": torch.randn(1000), "b": torch.randn(1000)}
    after = {"a": before["a"], "b": changed(before["b"], [3, 70], torch.float32)}
    facts = write_delta(tmp_path / "d", snapshot(before), snapshot(after), version=1, base=0)
    meta, payloads = read_delta(tmp_path / "d")
    assert list(payloads) == ["b"]
    assert (meta["version"], meta["base_version"], meta["format"]) == (1, 0, "delta-v1")
    assert (facts["changed"], facts["elements"], facts["full_bytes"]) == (2, 2000, 8000)
    assert facts["bytes"] < 1000


@pytest.fixture
def published(tmp_path):
    """A snapshot directory and three deltas on it, with the tensors of each version."""
    versions = [{"w": torch.randn(64, 32).bfloat16(), "n": torch.randn(32)}]
    for step in range(3):
        versions.append({**versions[-1], "w": changed(versions[-1]["w"], range(step, 2048, 97), torch.bfloat16)})
    directory = tmp_path / "v0"
    directory.mkdir()
    save_file(versions[0], directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    paths = []
    for at in range(3):
        paths.append(tmp_path / f"v{at + 1}.delta")
        write_delta(paths[-1], snapshot(versions[at]), snapshot(versions[at + 1]), version=at + 1, base=at)
    return directory, paths, versions


def holds(local, tensors):
    found = load_file(local.directory / "model.safetensors")
    return all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_local_copy_follows_version_by_version(published, tmp_path):
    directory, paths, versions = published
    local = LocalCheckpoint(tmp_path / "local")
    assert local.sync(directory, tuple(paths[:1])) is None
    assert holds(local, versions[1])
    assert local.sync(directory, tuple(paths[:2])) == {"w"}
    assert holds(local, versions[2])
    assert local.sync(directory, tuple(paths[:2])) == set()
    assert holds(local, versions[2])
    assert (local.directory / "config.json").exists()


def test_a_fresh_receiver_joins_at_the_newest_version(published, tmp_path):
    directory, paths, versions = published
    local = LocalCheckpoint(tmp_path / "local")
    local.sync(directory, tuple(paths))
    assert holds(local, versions[3])


def test_a_receiver_that_missed_versions_catches_up(published, tmp_path):
    directory, paths, versions = published
    local = LocalCheckpoint(tmp_path / "local")
    local.sync(directory, tuple(paths[:1]))
    assert local.sync(directory, tuple(paths)) == {"w"}
    assert holds(local, versions[3])


def test_a_copy_that_a_crash_left_half_changed_is_made_anew(published, tmp_path, monkeypatch):
    directory, paths, versions = published
    local = LocalCheckpoint(tmp_path / "local")
    local.sync(directory, tuple(paths[:1]))

    def dies(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("miles.deltas.apply_delta", dies)
        with pytest.raises(KeyboardInterrupt):
            local.sync(directory, tuple(paths[:2]))
    assert local.sync(directory, tuple(paths[:2])) is None
    assert holds(local, versions[2])


def test_a_delta_on_another_base_is_refused(published, tmp_path):
    directory, paths, _ = published
    local = LocalCheckpoint(tmp_path / "local")
    with pytest.raises(EngineError, match="does not follow"):
        local.sync(directory, (paths[1],))


def test_a_broken_file_says_what_to_do(tmp_path):
    (tmp_path / "torn.delta").write_bytes(b"\x10")
    with pytest.raises(EngineError, match="load the newest full snapshot"):
        read_delta(tmp_path / "torn.delta")


def test_bits_that_were_changed_behind_its_back_are_noticed(published, tmp_path):
    directory, paths, _ = published
    local = LocalCheckpoint(tmp_path / "local")
    local.sync(directory, tuple(paths[:1]))
    file = local.directory / "model.safetensors"
    raw = bytearray(file.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    at = 8 + int.from_bytes(raw[:8], "little") + header["w"]["data_offsets"][0]
    raw[at + 1] ^= 0xFF
    file.write_bytes(raw)
    with pytest.raises(EngineError, match="is not what was published"):
        local.sync(directory, tuple(paths[:2]))
    local.sync(directory, tuple(paths[:2]))  # and it heals from the snapshot
    assert np.array_equal(load_file(file)["w"].view(torch.int16), published[2][2]["w"].view(torch.int16))
