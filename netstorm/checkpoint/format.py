"""How a checkpoint looks: trees of values, tensors in files of safetensors, and the index of these. Pure.

A state is a tree of dictionaries, lists, tuples, numbers, texts, bytes, None and tensors. The tensors lie in
the format of safetensors, whole, under their names in the tree. What is left becomes MessagePack, with a
number in the place of each tensor, so that reading it never runs code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

import google_crc32c
import msgspec
import numpy as np

from netstorm.errors import CheckpointError, UsageError

__all__ = [
    "FORMAT",
    "INDEX",
    "Bytes",
    "Description",
    "File",
    "Index",
    "NumpyTensors",
    "Size",
    "Slot",
    "ValueTree",
    "checksum",
    "decode_files",
    "decode_index",
    "decode_tensors",
    "digest",
    "encode_index",
    "encode_tensors",
    "flatten",
    "folder_of_step",
    "numbered_file",
    "pack",
    "restore",
    "shares",
    "step_of_folder",
    "superfluous",
    "take_apart",
    "unflatten",
    "unpack",
]

Bytes: TypeAlias = bytes | bytearray | memoryview


def checksum(data: Bytes) -> int:
    """Return the CRC-32C (RFC 3720, B.4), which finds every change of up to 32 bits in a row."""
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


# ------------------------------------------------------------------------------------------------------ trees

_TENSOR: Final = 1
_TUPLE: Final = 2
_LARGE: Final = 3
"""Codes of MessagePack's extension type."""

_DEEPEST: Final = 64
"""Levels of nesting; deeper trees, and those that contain themselves, are refused."""
_INT64: Final = range(-(2**63), 2**64)
"""What MessagePack holds as a number."""
_METADATA: Final = "__metadata__"
"""What safetensors keeps among the names of tensors for other texts."""


def flatten(
    value: object, is_tensor: Callable[[object], bool], *, prefix: str = "", taken: Container[str] = ()
) -> tuple[bytes, dict[str, object]]:
    """Take the tensors out of a tree; return what is left, and them by name.

    A name says where in the tree its tensor is, such as "model.layers.0.weight". If it is taken already, a
    tilde follows.

    Args:
        value: the tree.
        is_tensor: whether an object is a tensor.
        prefix: of all names.
        taken: names of other tensors.

    Raises:
        UsageError: names an object that is neither plain nor a tensor, and says what to keep instead.
    """
    tensors: dict[str, object] = {}

    def plain(value: object, path: tuple[str, ...]) -> object:
        where = prefix + ".".join(path) or "the state"
        if len(path) > _DEEPEST:
            raise UsageError(
                f"{'.'.join(path[:4])}… is nested more than {_DEEPEST} levels deep, or contains itself"
            )
        if value is None or type(value) in {bool, float, str, bytes}:
            return value
        if type(value) is int:
            size = value.bit_length() // 8 + 1
            return (
                value
                if value in _INT64
                else msgspec.msgpack.Ext(_LARGE, value.to_bytes(size, "big", signed=True))
            )
        if is_tensor(value):
            name = where
            while name in tensors or name in taken or name == _METADATA:
                name += "~"
            tensors[name] = value
            return msgspec.msgpack.Ext(_TENSOR, (len(tensors) - 1).to_bytes(4, "big"))
        if isinstance(value, Mapping):
            for key in value:
                if type(key) is not str and not (type(key) is int and key in _INT64):
                    raise UsageError(
                        f"{where} has the key {key!r} of type {type(key).__name__}: keys must be str or int"
                    )
            return {key: plain(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in {list, tuple}:
            items = [plain(item, (*path, str(place))) for place, item in enumerate(value)]
            return (
                items if type(value) is list else msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
            )
        raise UsageError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds "
            "dictionaries, lists, tuples, numbers, texts, bytes, None and tensors; keep what it needs of it "
            "as those, such as its state_dict()"
        )

    return msgspec.msgpack.encode(plain(value, ())), tensors


def unflatten(values: bytes, tensors: Sequence[object]) -> object:
    """Return the tree that `flatten` took apart, with these tensors.

    Raises:
        CheckpointError: the bytes are no such tree.
    """

    def extension(code: int, data: memoryview) -> object:
        if code == _TENSOR:
            return tensors[int.from_bytes(data, "big")]
        if code == _TUPLE:
            items = decoder.decode(data)
            if not isinstance(items, list):
                raise ValueError("a tuple that is no list")
            return tuple(items)
        if code == _LARGE:
            return int.from_bytes(data, "big", signed=True)
        raise ValueError(f"unknown extension {code}")

    decoder = msgspec.msgpack.Decoder(ext_hook=extension)
    try:
        return decoder.decode(values)
    except (msgspec.MsgspecError, IndexError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the values of the checkpoint make no sense: {error}") from None


# ---------------------------------------------------------------------------------------------------- tensors


class Description(NamedTuple):
    """What is known of a tensor besides its bytes."""

    kind: str
    """Whose it is: "torch" or "numpy"."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int


_NUMBERS: Final = "biufc"
"""NumPy's kinds of types that are numbers."""


class NumpyTensors:
    """Tensors as bytes, in C order and this machine's byte order (little-endian): NumPy's arrays, to which a
    frontend adds its own.
    """

    KIND: Final = "numpy"

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor, also one that cannot be kept."""
        return isinstance(value, np.ndarray)

    def describe(self, tensor: object, name: str) -> Description:
        """Describe a tensor.

        Raises:
            UsageError: it cannot be kept; says `name`, and what to keep instead.
        """
        assert isinstance(tensor, np.ndarray)
        if tensor.dtype.kind not in _NUMBERS:
            raise UsageError(f"{name} is an array of {tensor.dtype}: a checkpoint holds arrays of numbers")
        return Description(self.KIND, tensor.dtype.newbyteorder("=").name, tensor.shape, tensor.nbytes)

    def data(self, tensor: object) -> memoryview:
        """Return its bytes, those in its memory if it can be."""
        assert isinstance(tensor, np.ndarray)
        native = tensor.astype(tensor.dtype.newbyteorder("="), copy=False)
        return np.ascontiguousarray(native).reshape(-1).view(np.uint8).data

    def restore(self, description: Description, data: memoryview) -> object:
        """Return a tensor in the memory of `data`, which is writable and nobody else's.

        Raises:
            CheckpointError: there is no such type here.
        """
        try:
            dtype = np.dtype(description.dtype)
        except (TypeError, ValueError, SyntaxError):
            dtype = np.dtype(object)
        if dtype.kind not in _NUMBERS:
            raise CheckpointError(f"the checkpoint has an array of type {description.dtype!r}")
        sides = description.shape
        if min(sides, default=0) < 0 or math.prod(sides) * dtype.itemsize != len(data):
            raise CheckpointError(f"the checkpoint has an array of {len(data)} bytes for {description}")
        return np.frombuffer(data, dtype).reshape(sides)


_CODES: Final = {
    "bool": "BOOL", "complex64": "C64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""The types of PyTorch and NumPy that safetensors has, and its own functions for PyTorch know."""
_PARTS: Final = {"complex128": ("F64", 8), "complex32": ("F16", 2)}
"""Of what other types consist; what is not here is bytes. The last side of such a tensor counts the parts."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Slot(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    data: memoryview


def encode_tensors(
    described: Mapping[str, Description],
    data: Callable[[str], Bytes],
    texts: Mapping[str, str] | None = None,
) -> bytearray:
    """Return tensors in the format of safetensors.

    The whole file is made in one piece of memory, which a tensor's bytes reach by a single copy.

    Args:
        described: the tensors, by name.
        data: returns the bytes of one.
        texts: what else to keep.
    """
    header: dict[str, object] = {_METADATA: texts} if texts else {}
    end = 0

    def item_size(name: str) -> int:
        tensor = described[name]
        return tensor.bytes // max(1, math.prod(tensor.shape))

    names = sorted(described, key=lambda name: (-item_size(name), name))  # so each is aligned to its items
    for name in names:
        one = described[name]
        code, shape = _CODES.get(one.dtype), one.shape
        if code is None:
            code, size = _PARTS.get(one.dtype, ("U8", 1))
            shape = (*shape, max(1, item_size(name) // size))
        header[name] = _Entry(code, shape, (end, end + one.bytes))
        end += one.bytes
    head = msgspec.json.encode(header)
    head += b" " * (-(8 + len(head)) % 64)
    buffer = bytearray(8 + len(head) + end)
    buffer[: 8 + len(head)] = len(head).to_bytes(8, "little") + head
    begin = 8 + len(head)
    with memoryview(buffer) as view:
        for name in names:
            size = described[name].bytes
            view[begin : begin + size] = data(name)
            begin += size
    return buffer


def decode_tensors(data: Bytes) -> tuple[dict[str, Slot], dict[str, str]]:
    """Return the tensors of a file of safetensors, in its memory, and its other texts.

    Raises:
        CheckpointError: it is none.
    """
    view = memoryview(data)
    begin = 8 + int.from_bytes(view[:8], "little")
    try:
        header = msgspec.json.decode(view[8:begin], type=dict[str, dict[str, object]])
        texts = msgspec.convert(header.pop(_METADATA, {}), dict[str, str])
        entries = msgspec.convert(header, dict[str, _Entry])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{len(view)} bytes of state are no tensors of safetensors: {error}") from None
    slots, end = {}, begin
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, last = (begin + offset for offset in entry.data_offsets)
        if not end == first <= last:
            raise CheckpointError(f"{name} is from byte {first} to {last} of a state, after byte {end}")
        slots[name] = Slot(entry.shape, view[first:last])
        end = last
    if end != len(view):
        raise CheckpointError(f"a state of {len(view)} bytes should have {end}")
    return slots, texts


def decode_files(files: Iterable[Bytes]) -> dict[str, Slot]:
    """Return the tensors of several files."""
    return {name: slot for file in files for name, slot in decode_tensors(file)[0].items()}


# ----------------------------------------------------------------------------------------------- whole states


class ValueTree(msgspec.Struct, frozen=True):
    """A state without its tensors' bytes."""

    values: bytes
    """MessagePack, with numbers in the places of tensors."""
    tensors: dict[str, str]
    """By name, whose and of which type each is, such as "torch.bfloat16"; in the order of their numbers."""


def take_apart(
    state: object, tensors: NumpyTensors, *, prefix: str = "", taken: Container[str] = ()
) -> tuple[ValueTree, dict[str, object], dict[str, Description]]:
    """Return a state's tree, and its tensors and their descriptions by name; for the arguments see `flatten`.

    Raises:
        UsageError: names what a checkpoint cannot hold.
    """
    values, named = flatten(state, tensors.is_tensor, prefix=prefix, taken=taken)
    described = {name: tensors.describe(tensor, name) for name, tensor in named.items()}
    types = {name: f"{description.kind}.{description.dtype}" for name, description in described.items()}
    return ValueTree(values, types), named, described


def restore(tree: ValueTree, slots: Mapping[str, Slot], tensors: NumpyTensors) -> object:
    """Return the state that `take_apart` was given; its tensors are in the memory of `slots`.

    Raises:
        CheckpointError: they do not fit together.
    """
    restored = []
    for name, kind_and_type in tree.tensors.items():
        if name not in slots:
            raise CheckpointError(f"the checkpoint names a tensor {name!r}, which is in none of its files")
        kind, _, dtype = kind_and_type.partition(".")
        shape, data = slots[name]
        shape = shape if dtype in _CODES else shape[:-1]
        restored.append(tensors.restore(Description(kind, dtype, shape, len(data)), data))
    return unflatten(tree.values, restored)


def pack(state: object, tensors: NumpyTensors) -> bytearray:
    """Return a state in one buffer, for the way from one rank to another. Equal states have equal bytes.

    Raises:
        UsageError: names what cannot be kept, and says what to keep instead.
    """
    tree, named, described = take_apart(state, tensors)
    texts = {"tree": msgspec.json.encode(tree).decode()}
    return encode_tensors(described, lambda name: tensors.data(named[name]), texts)


def unpack(buffer: Bytes, tensors: NumpyTensors) -> object:
    """Return the state that `pack` was given. Its tensors are in the memory of `buffer`.

    Raises:
        CheckpointError: the bytes are no such state.
    """
    slots, texts = decode_tensors(buffer)
    try:
        tree = msgspec.json.decode(texts.get("tree", ""), type=ValueTree)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{len(buffer)} bytes of state make no sense: {error}") from None
    return restore(tree, slots, tensors)


def digest(state: object, tensors: NumpyTensors) -> int:
    """Return a number below 2^63 that tells states apart, without copying them: two CRCs of 32 bits.

    Raises:
        UsageError: as for `pack`.
    """
    tree, named, described = take_apart(state, tensors)
    sums = b"".join(checksum(tensors.data(tensor)).to_bytes(4, "little") for tensor in named.values())
    return checksum(sums) << 31 | crc32(tree.values + repr(described).encode()) >> 1


def shares(sizes: Sequence[int], writers: int, *, first: Collection[int] = ()) -> list[int]:
    """Return who writes each tensor, so that all write about as much: the largest go to who has least.

    Args:
        sizes: bytes of each.
        writers: how many there are.
        first: tensors that the first one must write.
    """
    owners = [0] * len(sizes)
    loads = [0] * writers
    for tensor in sorted(range(len(sizes)), key=lambda tensor: (tensor not in first, -sizes[tensor], tensor)):
        owner = 0 if tensor in first else loads.index(min(loads))
        owners[tensor] = owner
        loads[owner] += sizes[tensor]
    return owners


# -------------------------------------------------------------------------------------------------- the index

FORMAT: Final = "netstorm-checkpoint-2"
INDEX: Final = "model.safetensors.index.json"
"""Its name, and its first two members, are those that other programs give an index of safetensors."""

_END: Final = re.compile(rb',\n "crc32c": "([0-9a-f]{8})"\n}\n')
_END_LENGTH: Final = len(b',\n "crc32c": "01234567"\n}\n')
_FOLDER: Final = re.compile(r"step-(\d{6,18})")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the checkpoint."""

    file: str
    """Its name in the checkpoint's folder."""
    bytes: int
    crc32c: str
    rank: int
    """Who has written it."""


class Size(msgspec.Struct, frozen=True):
    """Of all tensors."""

    total_size: int


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. It is written last: a checkpoint is complete if, and only if, it has an index.

    It is JSON, so that one can look at it, ends with a checksum of itself, and has those of all files.
    """

    metadata: Size
    weight_map: dict[str, str]
    """The file of each tensor."""
    format: str = FORMAT
    framework: str
    """Of the program that wrote it: "MXNet" or "PyTorch"."""
    job: str
    """Name of the job that wrote it, `NETSTORM_JOB`."""
    step: int
    token: str
    """Of the call that wrote it: tells its files from those of another attempt."""
    world_size: int
    """How many ranks wrote it."""
    written_at: float
    """Seconds since 1970."""
    rounds: dict[str, int]
    """The number of the last round of each key; PyTorch has no keys."""
    files: tuple[File, ...]
    state: ValueTree
    own: tuple[ValueTree, ...]
    """What each rank keeps for itself, in order; empty: nothing."""


def encode_index(index: Index) -> bytes:
    """Return an index as the text of its file."""
    head = msgspec.json.format(msgspec.json.encode(index), indent=1).removesuffix(b"\n}")
    return head + f',\n "crc32c": "{checksum(head):08x}"\n}}\n'.encode()


def decode_index(text: bytes, path: str) -> Index:
    """Return the index in a file.

    Args:
        text: of the file.
        path: for messages.

    Raises:
        CheckpointError: it is damaged, or of another version of the format.
    """
    head, end = text[:-_END_LENGTH], _END.fullmatch(text[-_END_LENGTH:])
    if end is None or int(end[1], 16) != checksum(head):
        raise CheckpointError(
            f"{path} is damaged, or no index of a checkpoint: its checksum is wrong ({len(text)} bytes); "
            "restore it from a copy, or remove its folder to use the checkpoint before it"
        )
    try:
        form = msgspec.json.decode(text, type=_Format).format
        if form != FORMAT:
            raise CheckpointError(
                f"{path} has the format {form!r}, and this version of NetStorm reads {FORMAT!r}: read it "
                "with the version that wrote it"
            )
        index = msgspec.json.decode(text, type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of a checkpoint: {error}") from None
    files = [one.file for one in index.files]
    wrong = [name for name in files if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)]
    wrong += [one.file for one in index.files if one.bytes < 0]
    wrong += [name for name, file in index.weight_map.items() if file not in files]
    for tree in (index.state, *index.own):
        wrong += [name for name in tree.tensors if name not in index.weight_map]
    if wrong or len(index.own) not in {0, index.world_size}:
        raise CheckpointError(f"{path} contradicts itself at {(wrong or ['own'])[0]}: do not use it")
    return index


class _Format(msgspec.Struct, frozen=True):
    format: str


def folder_of_step(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:06}"


def step_of_folder(name: str) -> int | None:
    """Return the step of a checkpoint's folder; None: it is something else."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match is not None and folder_of_step(int(match[1])) == name else None


def numbered_file(kind: str, place: int, writers: int, token: str) -> str:
    """Return the name of a file of one of the ranks that write.

    Args:
        kind: "model.safetensors": tensors; "part.json": says that these are there; "failed.txt": says why
            they will not come.
        place: of the rank among those that write.
        writers: how many they are.
        token: of the call.
    """
    stem, _, suffix = kind.partition(".")
    return f"{stem}-{place + 1:05}-of-{writers:05}-{token}.{suffix}"


def superfluous(complete: Mapping[int, bool], keep: int | None) -> list[int]:
    """Return the steps whose checkpoints may be removed, oldest first: never the newest complete one.

    Args:
        complete: by step, whether its checkpoint is complete.
        keep: number of complete ones to keep, at least 1; None: all.
    """
    kept = sorted((step for step, is_complete in complete.items() if is_complete), reverse=True)
    if not kept:
        return []
    oldest = kept[-1] if keep is None else kept[: max(1, keep)][-1]
    return sorted(  # a half-written one before the newest complete one will never be completed
        step
        for step, is_complete in complete.items()
        if step < oldest or (not is_complete and step < kept[0])
    )
