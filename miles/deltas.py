"""Published weights as differences: the file format `delta-v1`, who writes it and who applies it.

A delta is a safetensors file of byte tensors, one for each tensor that changed, whose metadata say what they mean:
format, version, base_version, digest (of all tensors afterwards), base_digest (before), and for each tensor dtype,
shape, codec, how many elements changed and its own digest afterwards. Digests are XXH3-128; the digest of a set is
that of its sorted "name digest" lines. Values are differences to the base, so a delta is applied to exactly the base
that it was made from, once: digests are checked before and after, and the same delta again changes nothing.

Codecs: `sparse` has the changed places (gaps of 16 bits, 65535 = 65535 unchanged elements) and the differences there,
`dense` all differences: of the bits taken as whole numbers, sign last (0, -1, 1, -2 are 0, 1, 2, 3). Numbers are split
into planes of bytes (all low bytes, and so on), every plane a zstd frame; before the frames stand their count and
sizes, little-endian integers of 4 bytes.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from miles.errors import EngineError

__all__ = ["LocalCheckpoint", "Snapshot", "apply_delta", "read_delta", "write_delta"]

FORMAT = "delta-v1"
_LEVEL = 3
_SKIP = 65535
_DENSE_ABOVE = 0.3  # share of changed elements from which places cost more than they save
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_TORCH = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}
_TORCH |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}

Bits = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Snapshot:
    """One version of all tensors as bits: {name: flat unsigned integers}, with dtypes (safetensors' names), shapes."""

    bits: Mapping[str, Bits]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    _digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Any]) -> "Snapshot":
        """Of torch tensors on the CPU; shares their memory."""
        import torch

        dtypes = {name: _TORCH[str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()}
        bits = {
            name: t.contiguous().reshape(-1).view(torch.uint8).numpy().view(_UNSIGNED[_BYTES[dtypes[name]]])
            for name, t in tensors.items()
        }
        return cls(bits, dtypes, {name: tuple(t.shape) for name, t in tensors.items()})

    def digest_of(self, name: str) -> str:
        """Digest of one tensor's bytes."""
        if name not in self._digests:
            self._digests[name] = _digest(self.bits[name])
        return self._digests[name]

    @cached_property
    def digest(self) -> str:
        """Digest of the whole set."""
        return _digest_of_set({name: self.digest_of(name) for name in self.bits})

    @property
    def nbytes(self) -> int:
        return sum(bits.nbytes for bits in self.bits.values())


def write_delta(path: Path, before: Snapshot, now: Snapshot, *, version: int, base: int) -> dict[str, Any]:
    """Write the difference of two versions, complete or not at all. Facts: bytes, full_bytes, changed, elements."""
    payloads: dict[str, NDArray[np.uint8]] = {}
    entries: dict[str, dict[str, Any]] = {}
    changed = 0
    for name, bits in now.bits.items():
        old = before.bits[name]
        places = np.flatnonzero(bits != old)
        if not len(places):
            now._digests[name] = before.digest_of(name)
            continue
        codec, data = _encode(old, bits, places)
        payloads[name] = np.frombuffer(data, dtype=np.uint8)
        changed += len(places)
        entries[name] = {
            "dtype": now.dtypes[name],
            "shape": now.shapes[name],
            "codec": codec,
            "changed": len(places),
            "digest": now.digest_of(name),
        }
    meta = {
        "format": FORMAT,
        "version": version,
        "base_version": base,
        "digest": now.digest,
        "base_digest": before.digest,
        "tensors": entries,
    }
    partial = path.with_name(path.name + ".partial")
    save_file(payloads, partial, metadata={"miles": json.dumps(meta)})
    partial.rename(path)
    elements = sum(bits.size for bits in now.bits.values())
    size = path.stat().st_size
    return {"bytes": size, "full_bytes": now.nbytes, "changed": changed, "elements": elements}


def read_delta(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.uint8]]]:
    """(metadata, payload of every changed tensor); EngineError when the file is not a whole delta."""
    try:
        with safe_open(path, framework="np") as file:
            meta = json.loads((file.metadata() or {}).get("miles", "{}"))
            payloads = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except Exception as error:  # safetensors raises its own and OSError
        raise EngineError(f"{path} is not a delta file: {error}; load the newest full snapshot") from error
    if meta.get("format") != FORMAT:
        raise EngineError(
            f"{path} has format {meta.get('format')!r}, this Miles reads {FORMAT}: use one version for both"
        )
    return meta, payloads


def apply_delta(bits: Mapping[str, Bits], meta: Mapping[str, Any], payloads: Mapping[str, NDArray[np.uint8]]) -> None:
    """Change `bits` (writable, the base of the delta) in place, tensor by tensor, and check each one's digest."""
    for name, entry in meta["tensors"].items():
        target = bits[name]
        _decode_into(target, str(entry["codec"]), payloads[name].tobytes())
        if _digest(target) != entry["digest"]:
            raise EngineError(f"after delta {meta['version']} tensor {name} is not what was published")


class LocalCheckpoint:
    """A receiver's own copy of the published model, brought from version to version in place.

    A program that loads model directories (a stock inference server) loads it from here. A copy that a crash left half
    changed says so, and is made anew from the full snapshot.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def sync(self, snapshot: Path, deltas: "tuple[Path, ...]") -> set[str] | None:
        """Bring the copy to the last delta. Returns the names that changed; None: everything was copied anew.

        `deltas` follow the snapshot without a gap; those that the copy has already are skipped.
        """
        chain = [(path, *read_delta(path)) for path in deltas]
        state = self._state()
        known = [at for at, (_, meta, _) in enumerate(chain) if meta["digest"] == state.get("digest")]
        changed: set[str] | None = set()
        if known:
            chain = chain[known[-1] + 1 :]
        elif not chain or chain[0][1]["base_digest"] != state.get("digest"):
            self._copy(snapshot)
            changed = None
        for path, meta, payloads in chain:
            self._apply(path, meta, payloads)
            if changed is not None:
                changed |= set(meta["tensors"])
        return changed

    def _state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self.directory / _STATE).read_text())
        except (OSError, ValueError):
            return {}
        return {} if state.get("changing") else state

    def _note(self, state: Mapping[str, Any]) -> None:
        partial = self.directory / (_STATE + ".partial")
        partial.write_text(json.dumps(state))
        partial.replace(self.directory / _STATE)

    def _copy(self, snapshot: Path) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(snapshot, self.directory)
        digests = {name: _digest(bits) for name, bits in self._mapped("r").items()}
        self._note({"digest": _digest_of_set(digests), "digests": digests})

    def _apply(self, path: Path, meta: Mapping[str, Any], payloads: Mapping[str, NDArray[np.uint8]]) -> None:
        state = self._state()
        if state.get("digest") != meta["base_digest"]:
            raise EngineError(f"{path} does not follow on what this copy has; load the newest full snapshot")
        self._note({**state, "changing": True})
        apply_delta(self._mapped("r+"), meta, payloads)
        digests = state["digests"] | {name: entry["digest"] for name, entry in meta["tensors"].items()}
        if _digest_of_set(digests) != meta["digest"]:
            raise EngineError(f"after {path} the copy is not what was published; load the newest full snapshot")
        self._note({"digest": meta["digest"], "digests": digests})

    def _mapped(self, mode: Any) -> dict[str, Bits]:
        """Every tensor of the copy's safetensors files, mapped from the disk."""
        found: dict[str, Bits] = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            raw = np.memmap(path, dtype=np.uint8, mode=mode)
            size = int(raw[:8].view("<u8")[0])
            header = json.loads(raw[8 : 8 + size].tobytes())
            for name, entry in header.items():
                if name != "__metadata__":
                    start, end = (8 + size + int(at) for at in entry["data_offsets"])
                    found[name] = raw[start:end].view(_UNSIGNED[_BYTES[entry["dtype"]]])
        return found


_STATE = "miles-state.json"


def _digest(bits: Bits) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(bits).data)


def _digest_of_set(digests: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())


def _encode(old: Bits, new: Bits, places: NDArray[np.int64]) -> tuple[str, bytes]:
    if len(places) > _DENSE_ABOVE * new.size:
        return "dense", _framed(_planes(_difference(old, new)))
    gaps = np.diff(places, prepend=-1) - 1
    skips = gaps // _SKIP
    steps = np.full(len(gaps) + int(skips.sum()), _SKIP, dtype=np.uint16)
    steps[np.arange(len(gaps)) + np.cumsum(skips)] = gaps % _SKIP
    return "sparse", _framed([*_planes(steps), *_planes(_difference(old[places], new[places]))])


def _decode_into(target: Bits, codec: str, data: bytes) -> None:
    planes = _unframed(data)
    if codec == "dense":
        target += _undone(_unplanes(planes, target.dtype))
        return
    steps = _unplanes(planes[:2], np.dtype(np.uint16)).astype(np.int64)
    values = _unplanes(planes[2:], target.dtype)
    places = np.cumsum(steps)[steps != _SKIP] + np.arange(len(values))
    target[places] += _undone(values)


def _difference(old: Bits, new: Bits) -> Bits:
    """new - old as whole numbers of that width, small ones of either sign first: 0, -1, 1, -2, 2, … are 0, 1, 2, 3, 4.

    A small step of a float is a small step of its bits, so most differences are 1 or 2.
    """
    step = new - old
    sign = (step >> step.dtype.type(8 * step.itemsize - 1)) * step.dtype.type(np.iinfo(step.dtype).max)
    found: Bits = (step << step.dtype.type(1)) ^ sign
    return found


def _undone(values: Bits) -> Bits:
    one = values.dtype.type(1)
    sign = (values & one) * values.dtype.type(np.iinfo(values.dtype).max)
    found: Bits = (values >> one) ^ sign
    return found


def _framed(planes: Sequence[bytes]) -> bytes:
    """Every plane by itself, as its bytes have statistics of their own: sizes (4 bytes each), then zstd frames."""
    frames = [zstandard.ZstdCompressor(level=_LEVEL).compress(plane) for plane in planes]
    return np.array([len(planes), *map(len, frames)], dtype="<u4").tobytes() + b"".join(frames)


def _unframed(data: bytes) -> list[bytes]:
    count = int(np.frombuffer(data[:4], dtype="<u4")[0])
    ends = 4 + 4 * count + np.cumsum([0, *np.frombuffer(data[4 : 4 + 4 * count], dtype="<u4")])
    frames = [data[start:end] for start, end in pairwise(ends)]
    return [zstandard.ZstdDecompressor().decompress(frame) for frame in frames]


def _planes(values: NDArray[Any]) -> list[bytes]:
    flat = np.ascontiguousarray(values)
    return [plane.tobytes() for plane in flat.view(np.uint8).reshape(-1, flat.itemsize).T]


def _unplanes(planes: Sequence[bytes], dtype: np.dtype[Any]) -> Bits:
    columns = np.stack([np.frombuffer(plane, dtype=np.uint8) for plane in planes], axis=1)
    return np.ascontiguousarray(columns).reshape(-1).view(dtype)
