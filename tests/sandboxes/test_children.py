import time

import pytest

from miles.sandboxes.children import Capture, Child

ENV = {"PATH": "/usr/bin:/bin"}


def test_a_flood_keeps_head_and_tail():
    capture = Capture(10)
    for _ in range(100):
        capture.feed(b"a" * 5000)
    capture.feed(b"END")
    assert capture.value() == b"aaaaa\n[... 499993 bytes cut ...]\naaEND"


def test_what_fits_is_kept_whole():
    capture = Capture(10)
    capture.feed(b"0123")
    capture.feed(b"456789")
    assert (capture.value(), capture.dropped) == (b"0123456789", 0)


async def test_status_and_both_streams():
    child = Child(["/bin/sh", "-c", "cat; echo err >&2; exit 3"], env=ENV, stdin=b"in")
    assert await child.wait() == 3
    assert (child.stdout.value(), child.stderr.value()) == (b"in", b"err\n")
    child.close()


async def test_a_background_child_that_holds_the_pipe_does_not_block():
    began = time.monotonic()
    child = Child(["/bin/sh", "-c", "sleep 30 & echo started"], env=ENV, stdin=b"")
    assert await child.wait() == 0
    assert time.monotonic() - began < 5
    assert child.stdout.value() == b"started\n"
    child.kill()
    child.close()


async def test_a_missing_program_is_an_error_at_once():
    with pytest.raises(FileNotFoundError):
        Child(["/no/such/program"], env=ENV)


async def test_a_child_that_holds_the_input_open_and_does_not_read_it_freezes_nobody():
    began = time.monotonic()
    child = Child(["sh", "-c", "exec 3<&0; sleep 3 <&3 & exit 0"], env=ENV, stdin=b"x" * 1_000_000)
    assert await child.wait() == 0
    child.close()
    child.kill()
    assert time.monotonic() - began < 2
