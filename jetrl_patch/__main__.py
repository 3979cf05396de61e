"""``python -m jetrl_patch``: the same as the ``jetrl`` command."""

from jetrl_patch.cli.main import main

if __name__ == "__main__":
    main()
