"""One folder per framework, installed as ``jetrl_patch.adapters``; each imports its framework inside functions."""

if __name__ == "adapters":
    raise ImportError(
        "this folder is installed as jetrl_patch.adapters; import it by that name (imported as 'adapters' every "
        "module in it would exist twice). From a clone: pip install -e ."
    )
