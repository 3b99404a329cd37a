"""Modules whose weights lie once in a device's memory, whoever uses them.

One process publishes a module under a name; others attach it, and their modules' parameters are views of the same memory: nothing is copied. See :func:`publish` and :func:`attach`.

A shared range holds the tensors one behind the other, each at a multiple of 512 bytes, then a manifest in JSON, and in its last 24 bytes a mark, where the manifest begins, and how long it is::

    | tensor 0 | tensor 1 | ... | manifest | mark (8) | offset (8) | length (8) |
"""

from __future__ import annotations

import ctypes
import json
import struct
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Tuple

from .. import library
from .._library import Shared, StitchdError

if TYPE_CHECKING:
    import torch

__all__ = ["SharedModule", "attach", "publish"]

_ALIGNMENT = 512
_MARK = b"stitchd1"
_TRAILER = struct.Struct("<8sQQ")

#: What DLPack calls the devices of each driver (dlpack.h, DLDeviceType).
_DEVICE_TYPES = {"host": 1, "cuda": 2, "hip": 10}


class SharedModule:
    """The tensors of a published module, in this process: until :meth:`close`, or the process ends.

    Where the range is not writable nobody may write the tensors: on the ``host`` driver a write ends the process, on a GPU it fails the device's work, as any write to memory that is mapped for reading does. They
    need no gradients.
    """

    def __init__(self, shared: Shared, tensors: Dict[str, "torch.Tensor"]) -> None:
        self._shared = shared
        self._tensors = tensors
        self._closed = False

    @property
    def version(self) -> int:
        """A module that is published later, under whatever name, has a larger number."""
        return self._shared.version

    @property
    def writable(self) -> bool:
        """Whether whoever attaches it may write it."""
        return self._shared.writable

    @property
    def sealed(self) -> bool:
        """The driver lets nobody write it any more. Where it is neither this nor writable each process keeps to that by itself."""
        return self._shared.sealed

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it takes, once for all processes."""
        return self._shared.size

    def state_dict(self) -> Dict[str, "torch.Tensor"]:
        """The tensors by name, as ``Module.state_dict`` names them. They are views: good until :meth:`close`."""
        return dict(self._tensors)

    def load_into(self, module: "torch.nn.Module", strict: bool = True) -> "torch.nn.Module":
        """Makes the shared tensors the module's parameters and buffers, in place of its own, and returns it. Nothing is copied: a module made under ``torch.device("meta")`` never takes memory of its own.

        Raises what ``Module.load_state_dict`` raises where names or shapes differ and ``strict`` is true.
        """
        known = module.state_dict().keys()
        # What a module computes once and does not store: without it one that was made on the meta device could do nothing.
        others = {name for name, _ in module.named_buffers()} - set(known)
        module.load_state_dict({name: tensor for name, tensor in self._tensors.items() if name not in others}, strict=strict, assign=True)
        for name in others & self._tensors.keys():
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, self._tensors[name])
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        return module

    def close(self) -> None:
        """Lets go of the memory, once the device has done what is queued; a second time nothing happens. Tensors of it mean nothing any more: touching one ends the process."""
        if self._closed:
            return
        self._closed = True
        self._tensors = {}
        library().share_close(self._shared)

    def __enter__(self) -> "SharedModule":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def publish(
    module: "torch.nn.Module",
    name: str,
    *,
    device: Optional[int] = None,
    linger: float = 600.0,
    writable: bool = False,
    key: Optional[bytes] = None,
    use: bool = False,
) -> SharedModule:
    """Copies a module's parameters and buffers into memory of the daemon, once, and publishes them under ``name`` (1 to 128 bytes), for other processes to :func:`attach`.

    A module that this tenant has published under the name before makes way: who has it keeps it. The memory outlives its last holder by ``linger`` seconds, as far as the daemon's ``linger_max`` goes. ``device``
    is the ordinal of the device that it is to lie on; without one that of the module's first tensor. With ``writable`` whoever attaches it may write it. With a ``key`` of 16 to 64 bytes it is for whoever has
    the key, of whatever tenant; without one for sessions of this tenant.

    With ``use`` the module itself goes over to the shared tensors, and its own memory is free. A module that is still trained keeps its own.

    Raises :class:`stitchd.StitchdError`, which says why.
    """
    import torch

    state = _tensors_to_share(module)
    if device is None:
        device = next((tensor.device.index or 0 for tensor in state.values() if tensor.device.type == "cuda"), 0)
    layout, length = _lay_out(state)
    manifest = json.dumps({"tensors": layout}).encode()
    total = length + len(manifest) + _TRAILER.size
    native = library()
    draft = native.share_create(total, device)
    try:
        room = _tensor_over(draft, total)
        with torch.no_grad():
            for tensor_name, (_, _, offset, size) in layout.items():
                if size:
                    room[offset : offset + size].copy_(_bytes_of(state[tensor_name].detach()))
            end = manifest + _TRAILER.pack(_MARK, length, len(manifest))
            room[length:total].copy_(torch.frombuffer(bytearray(end), dtype=torch.uint8))
        if room.device.type == "cuda":
            torch.cuda.synchronize(room.device)
        del room
        shared = native.share_publish(draft, name, content=total, linger=linger, writable=writable, key=key)
    except BaseException:
        native.share_close(draft, missing_ok=True)
        raise
    published = SharedModule(shared, dict(_tensors_of(shared)))
    return _using(published, module) if use else published


def _using(published: SharedModule, module: "torch.nn.Module") -> SharedModule:
    try:
        published.load_into(module)
    except BaseException:
        published.close()
        raise
    return published


def attach(name: str, *, version: int = 0, key: Optional[bytes] = None) -> SharedModule:
    """Holds what :func:`publish` has published under ``name``, and maps it here: the newest, or with a ``version`` exactly that one. Nothing is copied.

    ::

        with torch.device("meta"):
            model = GPT(config)
        stitchd.torch.attach("gpt").load_into(model)

    Raises :class:`stitchd.StitchdError` where there is none for this process, or it may not hold so much.
    """
    shared = library().share_attach(name, version=version, key=key)
    try:
        return SharedModule(shared, dict(_tensors_of(shared)))
    except BaseException:
        library().share_close(shared)
        raise


def _tensors_to_share(module: "torch.nn.Module") -> Dict[str, "torch.Tensor"]:
    """Parameters and buffers by name, those among them that are in no ``state_dict``. What else a module stores there is its own."""
    import torch

    state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    for name, buffer in module.named_buffers():
        state.setdefault(name, buffer)
    return state


_Layout = Dict[str, Tuple[str, List[int], int, int]]


def _lay_out(state: Dict[str, "torch.Tensor"]) -> Tuple[_Layout, int]:
    """Where each tensor goes: its dtype, shape, offset and bytes. Tensors that are one lie once."""
    layout: _Layout = {}
    places: Dict[Tuple[Any, ...], int] = {}
    end = 0
    for name, tensor in state.items():
        if tensor.layout is not _strided() or tensor.is_quantized:
            raise StitchdError(f"{name} is no dense tensor, and cannot be shared")
        size = tensor.numel() * tensor.element_size()
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if size and tensor.device.type != "meta" and same in places:
            offset = places[same]
        else:
            offset = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
            places[same] = offset
        if tensor.device.type == "meta":
            raise StitchdError(f"{name} is on the meta device, and has nothing to share")
        layout[name] = (str(tensor.dtype).rsplit(".", 1)[-1], list(tensor.shape), offset, size)
    return layout, end


def _strided() -> Any:
    import torch

    return torch.strided


def _bytes_of(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _tensors_of(shared: Shared) -> Iterator[Tuple[str, "torch.Tensor"]]:
    """The tensors of a published range, by its manifest, which another process wrote: nothing in it is taken on trust."""
    import torch

    if shared.content < _TRAILER.size:
        raise StitchdError(f"the shared range has {shared.content} bytes, and holds no module")
    room = _tensor_over(shared, shared.content)
    mark, begin, length = _TRAILER.unpack(bytes(room[-_TRAILER.size :].cpu().tolist()))
    if mark != _MARK or begin > shared.content or length > shared.content - begin:
        raise StitchdError("the shared range holds no module of this version of stitchd")
    try:
        manifest = json.loads(bytes(room[begin : begin + length].cpu().tolist()))
        described = manifest["tensors"].items()
        for name, (dtype_name, shape, offset, size) in described:
            dtype = getattr(torch, str(dtype_name), None)
            whole = all(isinstance(number, int) and number >= 0 for number in [offset, size, *shape])
            if not isinstance(dtype, torch.dtype) or not whole or offset + size > begin or offset % _ALIGNMENT:
                raise StitchdError(f"the manifest of the shared range is wrong at {name}")
            yield str(name), room[offset : offset + size].view(dtype).view(shape)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise error if isinstance(error, StitchdError) else StitchdError(f"the manifest of the shared range is wrong: {error}") from error


# --- A tensor over memory that PyTorch does not own: DLPack, whose structures are in dlpack.h.


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


#: PyTorch reads a structure when it makes the tensor and again when the last view goes: they stay.
_KEPT: List[Any] = []


def _tensor_over(shared: Shared, length: int) -> "torch.Tensor":
    """The first bytes of a range as a tensor of bytes, on the device where they lie. It does not keep the range."""
    from torch.utils.dlpack import from_dlpack

    driver = library().driver()
    if driver not in _DEVICE_TYPES:
        raise StitchdError(f"PyTorch has no tensors in memory of the driver '{driver}'")
    shape = (ctypes.c_int64 * 1)(length)
    managed = _DLManagedTensor()
    managed.dl_tensor.data = shared.address
    managed.dl_tensor.device = _DLDevice(_DEVICE_TYPES[driver], 0 if driver == "host" else shared.device)
    managed.dl_tensor.ndim = 1
    managed.dl_tensor.dtype = _DLDataType(1, 8, 1)
    managed.dl_tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    _KEPT.append((managed, shape))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return from_dlpack(capsule(ctypes.addressof(managed), b"dltensor", None))
