"""Judge the frameworks' own example scripts: ``python -m scripts.official DIR`` (``make official SCRIPTS=DIR``)."""
