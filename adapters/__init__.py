"""One folder per framework, installed as ``jetrl_patch.adapters``; each imports its framework inside functions."""

if __name__ == "adapters":
    raise ImportError(
        "this folder is installed as jetrl_patch.adapters: imported as 'adapters', each of its modules would exist twice. "
        "Import it as jetrl_patch.adapters; in a clone, run pip install -e . first."
    )
