from concurrent.futures import ThreadPoolExecutor

from safetensors.torch import load_file

from miles.models import load_model


def test_models_loaded_in_many_threads_at_once_have_the_weights_of_the_file(model):
    weights = load_file(model / "model.safetensors")
    with ThreadPoolExecutor(8) as threads:
        for loaded in threads.map(load_model, [model] * 8):
            parameters = dict(loaded.named_parameters())
            assert parameters.keys() == weights.keys()
            assert all(parameters[name].equal(weights[name]) for name in weights)
            assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
