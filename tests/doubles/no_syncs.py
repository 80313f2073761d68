"""The check that code looks at no value of a device's tensors; it works on a CPU."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

#: Operators whose result has a shape or value that the CPU needs.  In inference mode the last two are not split up.
LOOKS = (
    *("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive"),
    *("item", "is_nonzero"),
)


class NoLookAtTheDevice(TorchDispatchMode):
    """Fails on what would make the CPU wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in LOOKS, name
        return func(*args, **(kwargs or {}))
