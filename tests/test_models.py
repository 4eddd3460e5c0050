from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from miles.models import CheckpointWriter, checkpoint_tensors, load_model


def test_models_loaded_in_many_threads_at_once_have_the_weights_of_the_file(model):
    weights = load_file(model / "model.safetensors")
    with ThreadPoolExecutor(8) as threads:
        for loaded in threads.map(load_model, [model] * 8):
            parameters = dict(loaded.named_parameters())
            assert parameters.keys() == weights.keys()
            assert all(parameters[name].equal(weights[name]) for name in weights)
            assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


NAMES = ["qwen3-moe", "glm-4-moe", "qwen3.5-moe"]


@pytest.mark.parametrize("name", NAMES)
def test_live_tensors_get_the_names_of_checkpoint_files_and_come_back_by_them(moe_models, name):
    directory = moe_models[name]
    files = load_file(directory / "model.safetensors")
    model = load_model(directory)
    found = checkpoint_tensors(model, model.state_dict())
    assert set(files) <= set(found)
    assert any(".experts.1." in key for key in found)
    for key, tensor in files.items():
        assert torch.equal(found[key], tensor), key

    changed = {key: tensor + 1 for key, tensor in files.items()}
    writer = CheckpointWriter(model)
    with torch.no_grad():
        for key, tensor in changed.items():
            assert writer.knows(key)
            writer.write(key, tensor)
    again = checkpoint_tensors(model, model.state_dict())
    for key, tensor in changed.items():
        assert torch.equal(again[key], tensor), key
    assert not writer.knows("model.layers.0.mlp.experts.99.up_proj.weight")
