"""zerolab: the truth about the memory of a HuggingFace Trainer run, with or without DeepSpeed.

`from zerolab import MemoryCallback` is all that a script of your own needs. The import is lazy so that the modules
that need no torch (units, record, ds_config, launch) stay importable without it, and so that run_zero.py can set the
process environment before torch is loaded.
"""

__version__ = "0.1.0"
__all__ = ["MemoryCallback", "__version__"]


def __getattr__(name: str):
    if name == "MemoryCallback":
        from zerolab.callback import MemoryCallback

        return MemoryCallback
    raise AttributeError(f"module 'zerolab' has no attribute {name!r}")
