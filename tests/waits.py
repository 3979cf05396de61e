"""A stand-in for a GPU: refuses what would make the host wait for one."""

from torch.utils._python_dispatch import TorchDispatchMode


class NothingIsReadBack(TorchDispatchMode):
    """Refuses operators that make the host wait for the device."""

    REFUSED = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero", "aten::equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        # autograd names the device of a gradient that it converts; only another one means a copy
        moved = name == "aten::_to_copy" and (kwargs or {}).get("device") not in (None, args[0].device)
        if name in self.REFUSED or moved:
            raise AssertionError(f"{name} waits for the device")
        return out
