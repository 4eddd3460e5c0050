"""Local sandboxes of directories, tarballs and OCI archives: writable, thrown away, and without Python inside."""

import asyncio
import io
import json
import shutil
import tarfile

import pytest

from miles.errors import SandboxError
from miles.sandboxes.base import Image, SandboxSpec
from miles.sandboxes.local.backend import LocalBackend
from tests.emulators.images import busybox_root, python_root
from tests.sandboxes.test_local import greeter

pytestmark = pytest.mark.skipif(shutil.which("busybox") is None, reason="busybox is not installed (busybox-static)")


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))


async def made(image, **facts):
    return await LocalBackend().create(SandboxSpec(image=image, **facts))


async def test_a_directory_is_the_root_and_stays_as_it_is(tmp_path):
    root = busybox_root(tmp_path / "root")
    before = sorted(str(path) for path in root.rglob("*"))
    machine = await made(Image(rootfs=root), files={"/workspace/note": b"hi"}, env={"A": "b"})
    result = await machine.exec(
        "cat note; id -u; echo $HOME $A; rm -r /etc; echo new > /new; mkdir /bin/deep; ls -d /etc"
    )
    assert result.stdout == b"hi0\n/root b\n"
    assert "/etc" in result.stderr.decode()
    await machine.write("/root/there/x", b"1")
    assert await machine.read("/root/there/x") == b"1"
    kept = await machine.snapshot()
    await machine.destroy()
    assert sorted(str(path) for path in root.rglob("*")) == before
    again = await made(kept)
    assert (await again.exec("cat /new /root/there/x; test -e /etc/passwd || echo gone")).stdout == b"new\n1gone\n"
    await again.destroy()


async def test_without_python_commands_work_and_the_model_is_reached_but_there_are_no_streams(tmp_path):
    machine = await made(Image(rootfs=busybox_root(tmp_path / "root")))
    assert (await machine.exec("sleep 974 & sleep 974", timeout_s=0.3)).outcome == "timeout"
    assert (await machine.exec("ps | grep -c '[s]leep 974'")).stdout == b"0\n"
    with pytest.raises(SandboxError, match="has no python3, which streams and ports need"):
        await machine.spawn("true")
    async with greeter() as connect:
        port = await machine.reach(connect)
        assert (await machine.exec(f"nc 127.0.0.1 {port}")).stdout == b"hello"
    await machine.destroy()


async def test_with_python_in_it_there_are(tmp_path):
    machine = await made(Image(rootfs=python_root(tmp_path / "root")))
    process = await machine.spawn(["python3", "-c", "print('hi')"])
    assert [part async for part in process.output()] == [("stdout", b"hi\n")]
    await machine.destroy()


async def test_a_tarball_is_unpacked_once(tmp_path):
    root = busybox_root(tmp_path / "root")
    with tarfile.open(tmp_path / "root.tar.gz", "w:gz") as archive:
        archive.add(root, arcname=".")
    image = Image(rootfs=tmp_path / "root.tar.gz")
    await asyncio.gather(*(LocalBackend().prepare(image) for _ in range(3)))
    unpacked = list((tmp_path / "home" / "rootfs").iterdir())
    assert len(unpacked) == 1
    machine = await made(image)
    assert (await machine.exec("ls /bin | wc -l")).exit_code == 0
    await machine.destroy()
    assert list((tmp_path / "home" / "rootfs").iterdir()) == unpacked


def packed(files):
    """A layer: name -> text, or None for a folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            if text is None:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            else:
                entry.size = len(text)
            archive.addfile(entry, io.BytesIO((text or "").encode()))
    return out.getvalue()


async def test_an_oci_archives_layers_delete_what_is_below(tmp_path):
    base = io.BytesIO()
    with tarfile.open(fileobj=base, mode="w") as archive:
        archive.add(busybox_root(tmp_path / "root"), arcname=".")
    layers = {
        "a/layer.tar": base.getvalue(),
        "b/layer.tar": packed({"old": "1", "whole": None, "whole/one": "1", "kept": "1"}),
        "c/layer.tar": packed({".wh.old": "", "whole/.wh..wh..opq": "", "whole/two": "2", "kept": "2"}),
    }
    config = {"config": {"Env": ["PATH=/bin", "COLOUR=red"]}}
    manifest = [{"Config": "config.json", "Layers": list(layers)}]
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        contents = {
            "manifest.json": json.dumps(manifest).encode(),
            "config.json": json.dumps(config).encode(),
            **layers,
        }
        for name, data in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    machine = await made(Image(rootfs=tmp_path / "image.tar"))
    result = await machine.exec("echo $COLOUR; ls /old; ls /whole; cat /kept")
    assert result.stdout == b"red\ntwo\n2"
    await machine.destroy()


@pytest.mark.parametrize("content", [b"no tarball", None])
async def test_what_is_no_root_file_system_is_told(tmp_path, content):
    path = tmp_path / "root.tar"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SandboxError, match=r"cannot be unpacked|there is no root file system at"):
        await made(Image(rootfs=path))
    assert not [path for path in (tmp_path / "home").rglob("*.partial")]
