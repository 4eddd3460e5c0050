import pytest

from miles.errors import ConfigError
from miles.registry import KINDS, known, resolve


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_name_can_be_imported(kind):
    for name in known(kind):
        assert resolve(kind, name) is not None


def test_an_unknown_name_lists_the_nearest_and_the_known():
    with pytest.raises(ConfigError, match="unknown harness 'raect'; did you mean react"):
        resolve("harnesses", "raect")
    with pytest.raises(ConfigError, match="Known: guess-number, gymnasium, terminal, vault"):
        resolve("envs", "nothing-like-it")


def test_own_code_is_named_by_module_and_attribute():
    assert resolve("envs", "miles.envs.vault:VaultTaskset").name == "vault"


def test_a_missing_module_says_what_to_install():
    with pytest.raises(ConfigError, match=r"there is no module 'no_such_module'\. If it is your own"):
        resolve("envs", "no_such_module:Taskset")
    with pytest.raises(ConfigError, match="has no attribute 'Nothing'"):
        resolve("envs", "miles.envs.vault:Nothing")
