import pickle

import pytest

from miles import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_pickling(name):
    cls = getattr(errors, name)
    error = cls(7, 5) if name == "ContextOverflow" else cls("do this")
    error.extra = "kept"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


def test_only_what_a_fresh_start_may_mend_is_retryable():
    retryable = {name for name in errors.__all__ if getattr(errors, name).retryable}
    assert retryable == {"SandboxCreateFailed", "SandboxLost", "EngineLost"}
